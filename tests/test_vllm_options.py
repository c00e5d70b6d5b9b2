"""vLLM's options that are not here: neutral values pass everywhere alike, others are refused by name."""

import json
import logging

import pytest

from jaxpaged.config import EngineConfig, all_options
from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags, engine_options
from jaxpaged.errors import ConfigError
from jaxpaged.vllm_options import FOREIGN_OPTIONS

OWN = {f.name for _, f in all_options()}
NAMES = sorted(FOREIGN_OPTIONS)
WRONG = object()


def parsed(*words):
    parser = Parser(prog="test")
    add_engine_flags(parser)
    return engine_options(parser.parse_args(list(words)))


def as_words(name, value):
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]


def test_no_option_is_both_ours_and_foreign():
    assert OWN & set(NAMES) == set()


@pytest.mark.parametrize("name", NAMES)
def test_vllms_default_passes_from_python_from_flags_and_from_a_file(name, tmp_path, caplog):
    default = FOREIGN_OPTIONS[name].default
    assert EngineConfig.from_options(**{name: default}) == EngineConfig()
    assert EngineConfig.from_options(**parsed(*as_words(name, default))) == EngineConfig()
    file = tmp_path / "engine.yaml"
    file.write_text(f"{name.replace('_', '-')}: {json.dumps(default)}\n")
    assert EngineConfig.from_options(**parsed("--config", str(file))) == EngineConfig()
    assert caplog.records == []


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_be_neutral_is_refused_by_name_with_a_reason(name):
    with pytest.raises(ConfigError, match=rf"^{name} is <object .*, but .{{10,}}\. Leave it out\.$"):
        EngineConfig.from_options(**{name: WRONG})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True), ("trust_remote_code", 1), ("tokenizer_mode", "mistral"), ("cpu_offload_gb", 10),
        ("prefill_context_parallel_size", 2), ("data_parallel_rank", True), ("hf_overrides", {"rope_theta": 1}),
        ("enable_lora", True), ("limit_mm_per_prompt", {"image": 1}),
        ("structured_outputs_config", {"backend": "outlines"}), ("compilation_config", 3), ("enforce_eager", "yes"),
        ("enable_kv_cache_events", True), ("distributed_executor_backend", "external_launcher"),
        ("allowed_local_media_path", "/"), ("worker_cls", "my.Worker"),
    ],
)  # fmt: skip
def test_what_asks_for_something_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_mode", "hf"), ("limit_mm_per_prompt", {"image": 0, "video": 0}), ("cpu_offload_gb", 0.0),
        ("structured_outputs_config", {"backend": "guidance"}), ("collect_detailed_traces", ()), ("hf_token", True),
        ("disable_log_stats", True), ("disable_custom_all_reduce", True), ("swap_space", 0), ("hf_overrides", None),
    ],
)  # fmt: skip
def test_other_values_that_ask_for_nothing_pass(name, value, caplog):
    assert EngineConfig.from_options(**{name: value}) == EngineConfig()
    assert caplog.records == []


def test_eager_mode_is_let_through_with_a_word(caplog):
    with caplog.at_level(logging.WARNING):
        assert EngineConfig.from_options(enforce_eager=True) == EngineConfig()
    assert "enforce_eager=True changes nothing: there is no eager mode" in caplog.text


def test_a_flag_of_vllm_is_not_in_the_help():
    parser = Parser(prog="test")
    add_engine_flags(parser)
    assert "--trust-remote-code" not in parser.format_help()


@pytest.mark.parametrize(
    "line",
    [
        "--dtype half --max-model-len auto --enforce-eager --swap-space 8 --disable-log-stats",
        "--max-model-len -1 --no-trust-remote-code --tokenizer-mode auto --pipeline-parallel-size 1",
        "--hf-overrides {} --kv-cache-dtype auto --config-format hf",
        '--limit-mm-per-prompt {"image":0} --load-format auto --distributed-executor-backend uni',
    ],
)
def test_command_lines_for_vllm_parse(line):
    options = parsed(*line.split())
    assert EngineConfig.from_options(**options).model.max_model_len is None
