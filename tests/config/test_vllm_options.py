"""vLLM's options that are not here: neutral values pass everywhere alike, others are refused by name."""

import json
import logging

import pytest

from jaxpaged.config import EngineConfig, all_options, vllm_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS, VALUES
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli import main
from jaxpaged.entrypoints.cli.flags import engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.errors import ConfigError

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
    what_to_do = r"[A-Z](?!.*\. [A-Z].*\. [A-Z]).{8,}\."
    with pytest.raises(ConfigError, match=rf"^{name} is (<object .*|'\*\*\*'), but .{{10,}}\. {what_to_do}$"):
        EngineConfig.from_options(**{name: WRONG})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", 1),
        ("tokenizer_mode", "mistral"),
        ("cpu_offload_gb", 10),
        ("prefill_context_parallel_size", 2),
        ("data_parallel_rank", True),
        ("structured_outputs_config", {"backend": "outlines"}),
        ("enforce_eager", "yes"),
        ("enable_kv_cache_events", True),
        ("distributed_executor_backend", "external_launcher"),
        ("ec_manager_config", {"capacity": 1}),
        ("worker_cls", "my.Worker"),
    ],
)
def test_what_asks_for_something_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is "):
        EngineConfig.from_options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokenizer_mode", "hf"),
        ("cpu_offload_gb", 0.0),
        ("structured_outputs_config", {"backend": "guidance"}),
        ("collect_detailed_traces", ()),
        ("hf_token", True),
        ("disable_log_stats", True),
        ("disable_custom_all_reduce", True),
        ("swap_space", 0),
        ("hf_overrides", None),
        ("safetensors_load_strategy", "prefetch"),
        ("ignore_patterns", ["original/**/*"]),
        ("model_impl", "vllm"),
        ("mamba_cache_mode", "align"),
        ("watermark", 0.01),
        ("device", "auto"),
    ],
)
def test_other_values_that_ask_for_nothing_pass(name, value, caplog):
    assert EngineConfig.from_options(**{name: value}) == EngineConfig()
    assert caplog.records == []


def test_eager_mode_is_let_through_with_a_word(caplog):
    with caplog.at_level(logging.WARNING):
        assert EngineConfig.from_options(enforce_eager=True) == EngineConfig()
    assert "enforce_eager=True changes nothing: there is no eager mode" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trust_remote_code", True),
        ("compilation_config", {"cudagraph_mode": "FULL"}),
        ("compilation_config", 3),
        ("preemption_mode", "swap"),
        ("moe_backend", "triton"),
        ("cuda_graph_sizes", [1, 2]),
        ("enable_dbo", True),
        ("model_loader_extra_config", {"enable_multithread_load": True}),
        ("attention_config", {"backend": "X"}),
    ],
)
def test_what_changes_only_how_vllm_works_passes_with_a_word(name, value, caplog):
    assert EngineConfig.from_options(**{name: value}) == EngineConfig()
    assert [f"{name}=" in record.getMessage() for record in caplog.records] == [True]


# ---- names that are other ones here


def test_the_parts_of_a_speculative_config_become_one():
    config = EngineConfig.from_options(spec_method="ngram", spec_tokens=3, speculative_config={"prompt_lookup_max": 4})
    assert config.speculative.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
    }
    of_flags = EngineConfig.from_options(**parsed("--spec-method", "ngram", "--spec-tokens", "3"))
    assert of_flags.speculative.num_drafts == 3


def test_an_older_name_becomes_the_newer_one():
    config = EngineConfig.from_options(override_pooler_config={"pooling_type": "MEAN"})
    assert config.model.pooler_config == {"pooling_type": "MEAN"}


@pytest.mark.parametrize(("size", "num_bytes"), [(4, 4 << 30), (0.5, 1 << 29)])
def test_a_size_of_offloaded_keys_and_values_is_a_tier_of_host_memory(size, num_bytes):
    [tier] = EngineConfig.from_options(kv_offloading_size=size, kv_offloading_backend="native").cache.offload.tiers
    assert (tier.kind, tier.capacity) == ("host", num_bytes)
    [tier] = EngineConfig.from_options(**parsed("--kv-offloading-size", str(size))).cache.offload.tiers
    assert (tier.kind, tier.capacity) == ("host", num_bytes)


@pytest.mark.parametrize("size", [0, -1, "much", True])
def test_a_size_that_is_none_is_refused_by_the_name_that_was_given(size):
    with pytest.raises(ConfigError, match="^kv_offloading_size is .*, but it must be a number of GiB, above 0. Give 4"):
        EngineConfig.from_options(kv_offloading_size=size)


def test_what_is_given_under_both_names_is_refused():
    with pytest.raises(ConfigError, match="spec_tokens and speculative_config are both given"):
        EngineConfig.from_options(spec_tokens=3, speculative_config={"method": "ngram", "num_speculative_tokens": 4})


# ---- the device


@pytest.mark.parametrize(
    ("platforms", "device", "passes"),
    [
        ("cpu", "cpu", True),
        ("cpu", "auto", True),
        ("cpu", "cuda", False),
        ("cpu", "tpu", False),
        ("cuda,cpu", "cuda", True),
        ("cuda", "gpu", True),
        ("cuda,cpu", "cpu", False),
        ("tpu", "tpu", True),
        ("cpu", "hpu", False),
        ("cpu", 3, False),
    ],
)
def test_a_device_passes_where_jax_takes_it_anyway(monkeypatch, platforms, device, passes):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    if passes:
        assert EngineConfig.from_options(device=device) == EngineConfig()
        return
    with pytest.raises(ConfigError, match="^device is .* Set JAX_PLATFORMS to cpu, cuda or tpu"):
        EngineConfig.from_options(device=device)


@pytest.mark.parametrize(("installed", "kind"), [("libtpu", "tpu"), ("jax_plugins.xla_cuda13", "gpu"), ("", "cpu")])
def test_without_the_variable_what_is_installed_tells_the_device(monkeypatch, installed, kind):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(vllm_options, "is_installed", lambda module: module == installed)
    assert vllm_options.device_kind() == kind


# ---- values of options that are ours, too


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in VALUES for value in VALUES[name]])
def test_a_value_of_vllms_is_refused_with_what_to_do(name, value):
    for spelled in (value, value.upper()):
        with pytest.raises(ConfigError, match=f"^{name} is '{spelled}', but .*(Give|Leave|Serve|Name) ") as refused:
            EngineConfig.from_options(**parsed(f"--{name.replace('_', '-')}", spelled))
        assert "must be one of" not in str(refused.value)


def test_another_value_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="quantization is 'int3'; it must be one of int8, int4, .* Did you mean"):
        EngineConfig.from_options(**parsed("--quantization", "int3"))


# ---- secrets


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_token", "hf_SECRET"),
        ("additional_config", {"api_key": "SECRET", "a": [{"Password": "SECRET"}]}),
        ("fault_tolerance_config", {"aws-secret-access-key": "SECRET"}),
        ("otlp_metrics_endpoint", "http://u:SECRET@h"),
        ("lora_modules", ["http://SECRET@h/a"]),
        ("kv_offload", {"redis_password": "SECRET"}),
        ("load_format", "s3://SECRET@host"),
        ("max_num_seqs", {"token": "SECRET"}),
        ("hf_token", {"x": "SECRET"}),
        ("hf_token", ["SECRET"]),
        ("hf_token", b"SECRET"),
    ],
)
def test_a_refusal_never_prints_a_secret_back(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is .*\*\*\*") as refused:
        EngineConfig.from_options(**{name: value})
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize("line", ["--hf-token SECRET", "--hf-tokem=SECRET", """--kv-events-config {"key":"SECRET"""])
def test_a_flag_never_prints_a_secret_back(line, capsys):
    with pytest.raises((ConfigError, SystemExit)) as refused:
        EngineConfig.from_options(**parsed(*line.split()))
    assert "SECRET" not in f"{refused.value} {capsys.readouterr().err}"


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


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "--otlp-traces-endpoint", "ftp://u:SECRET@h:1", "hi"],
        ["chat", "--url", "ftp://u:SECRET@h:1"],
        ["generate", "-m", "https://SECRET@hub.example/a", "hi"],
        ["serve", "--hf-token", "SECRET"],
        ["bench", "serve", "--base-url", "ftp://u:SECRET@h:1", "--num-prompts", "1"],
    ],
)
def test_a_command_never_prints_a_secret_back(line, capsys):
    assert main(line) != 0
    said = capsys.readouterr().err
    assert "***" in said and "SECRET" not in said
