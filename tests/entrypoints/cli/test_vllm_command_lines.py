"""Command lines as vLLM's documentation, recipes and Helm charts write them: they parse, or are refused by name."""

import argparse
import dataclasses
import shlex

import pytest

from jaxpaged import EngineArgs
from jaxpaged.config import EngineConfig
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS
from jaxpaged.entrypoints.cli import command_line
from jaxpaged.entrypoints.cli.flags import read_config_file
from jaxpaged.entrypoints.cli.serve import split_options
from jaxpaged.errors import ConfigError, UsageError
from jaxpaged.serving.foreign_options import FOREIGN_SERVER_OPTIONS
from jaxpaged.serving.options import ServerOptions
from tests.vllm_serve_names import EARLIER, ENGINE, SERVER, SHORT

LINES = [
    "serve Qwen/Qwen3-0.6B",
    "serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192 --gpu-memory-utilization 0.9 --enable-prefix-caching",
    "serve --model Qwen/Qwen3-8B --host 0.0.0.0 --port 8000 --dtype bfloat16 --api-key token-abc123",
    "serve MODEL --tensor-parallel-size 4 --pipeline-parallel-size 1 --max-num-seqs 256 --max-num-batched-tokens 8192",
    "serve MODEL -tp 2 -pp 1 -dp 4 --trust-request-chat-template --disable-log-requests",
    "serve MODEL --dtype half --enforce-eager --swap-space 16 --disable-log-stats",
    "serve MODEL --max-model-len auto --kv-cache-dtype auto --block-size 16 --seed 42",
    "serve MODEL --served-model-name my-model my-alias --generation-config vllm",
    "serve MODEL --enable-auto-tool-choice --tool-call-parser hermes --chat-template ./tool_chat_template.jinja",
    "serve MODEL --reasoning-parser deepseek_r1 --enable-chunked-prefill --no-enable-prefix-caching",
    """serve MODEL --enable-lora --max-loras 4 --lora-modules a=/x '{"name": "b", "path": "/y"}' c=/z""",
    """serve MODEL --override-generation-config '{"temperature": 0.5}' --limit-mm-per-prompt '{"image": 0}'""",
    """serve MODEL --allowed-origins '["https://a.example", "*"]' --hf-overrides '{}' --root-path ''""",
    "serve MODEL --load-format safetensors --download-dir /models --revision main --tokenizer MODEL",
    "serve MODEL --tokenizer-mode auto --no-trust-remote-code --distributed-executor-backend mp",
    "serve MODEL --api-server-count 1 --disable-frontend-multiprocessing --chat-template-content-format auto",
    "serve MODEL --max-logprobs 50 --logprobs-mode raw_logprobs --async-scheduling --shutdown-timeout 60",
    "serve MODEL --enable-prompt-tokens-details --enable-force-include-usage --enable-request-id-headers",
    "serve MODEL --max-num-queued-reqs 100 --max-num-queued-tokens 100k --kv-cache-memory-bytes 4G",
    "serve MODEL --runner pooling --convert embed --max-num-seqs 64",
    """serve MODEL --runner pooling --pooler-config '{"pooling_type": "MEAN"}'""",
    """serve MODEL --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
    "serve MODEL --data-parallel-size 4 -tp 2 -ep",
    "serve MODEL --tensor-parallel-size 4 --pipeline-parallel-size 2",
    "serve MODEL --model MODEL --trust-remote-code --device cpu --uvicorn-log-level warning --max-log-len 100",
    "serve MODEL --preemption-mode recompute --kv-offloading-backend native --disable-uvicorn-access-log",
    """serve MODEL --default-chat-template-kwargs '{"enable_thinking": false}' --hf-overrides '{"rope_theta": 1e6}'""",
    "serve MODEL --max_model_len 8k --max_num_seqs=4 -n 1 -r 0 -asc 1 -O3",
    "serve MODEL --speculative-config.method ngram --speculative-config.num_speculative_tokens=3",
    "serve MODEL --compilation-config '{\"level\": 3}' --cudagraph-capture-sizes 1 2 4 --kernel-config.a b",
    "serve MODEL -O 2 --long-prefill-token-threshold 512 --prefix-caching-hash-algo sha256",
]
REFUSED = {
    "serve MODEL --prefill-context-parallel-size 2": "prefill_context_parallel_size",
    "serve MODEL -dp 4 --data-parallel-size-local 2": "data_parallel_size_local",
    """serve MODEL --kv-transfer-config '{"kv_connector": "P2pNcclConnector"}'""": "kv_transfer_config",
    "serve MODEL --quantization bitsandbytes": "quantization is 'bitsandbytes', but checkpoints in this format are not",
    "serve MODEL --kv-cache-dtype nvfp4": "kv_cache_dtype is 'nvfp4', but keys and values are cached in 8 bits or more",
    "serve MODEL --lora-modules a b=/y": "lora_modules has 'a'; give NAME=PATH",
    "serve MODEL --max-lora-rank 20": "max_lora_rank is 20; it must be one of 1, 8, 16",
    """serve MODEL --default-mm-loras '{"image": "/x"}'""": "default_mm_loras",
    "serve MODEL --kv-offloading-backend lmcache": "Give kv_offload 'host=4G,lmcache=lm://HOST:PORT'",
    "serve MODEL --ssl-ciphers X": "ssl_ciphers",
    "serve MODEL --model OTHER": "two models",
    "serve MODEL --uvicorn-log-level loud": "log_level is 'loud'",
    "serve MODEL --uvicorn-log-level error --log-level info": "uvicorn_log_level and log_level are both given",
    "serve MODEL --api-server-count 4": "api_server_count",
    "serve MODEL --middleware my.Middleware": "middleware",
}


def options_of(line):
    """Both kinds of options, checked, as `jaxpaged serve` makes them before it loads anything."""
    server, engine = split_options(command_line().parse_args(shlex.split(line)))
    return ServerOptions.from_options(server), EngineConfig.from_options(**engine)


@pytest.mark.parametrize("line", [line for line in LINES if "--root-path" not in line])
def test_a_command_line_for_vllm_is_taken_as_it_is(line):
    _, engine = options_of(line)
    assert engine.model.model == shlex.split(line)[2 if line.startswith("serve --") else 1]


@pytest.mark.parametrize("line", REFUSED)
def test_what_it_asks_for_and_is_not_there_is_named(line, capsys):
    with pytest.raises((UsageError, SystemExit)) as refused:
        options_of(line)
    said = capsys.readouterr().err if refused.type is SystemExit else str(refused.value)
    assert REFUSED[line] in said


def test_adapters_are_words_or_json():
    server, engine = options_of(
        """serve M --enable-lora --lora-modules a=/x '{"name": "b", "path": "/y", "base_model_name": "c"}' """
        """--lora-modules '[{"name": "d", "path": "/z"}]' --lora-target-modules q_proj k_proj"""
    )
    b, d = {"name": "b", "path": "/y", "base_model_name": "c"}, {"name": "d", "path": "/z"}
    assert server.lora_modules == ("a=/x", b, d) and engine.lora.lora_target_modules == ("q_proj", "k_proj")


def test_uvicorns_options_are_ours():
    server, _ = options_of("serve M --uvicorn-log-level critical --disable-uvicorn-access-log")
    assert (server.log_level, server.access_log) == ("error", False)
    assert options_of("serve M --uvicorn-log-level trace")[0].log_level == "debug"


def test_keys_of_json_may_be_given_one_by_one():
    _, engine = options_of(
        "serve M --speculative-config.method ngram --speculative_config.num_speculative_tokens=5 "
        "--hf-overrides.rope_scaling.factor 2 --hf-overrides.rope_scaling.type=yarn --hf-overrides.a+ 1 "
        "--hf-overrides.a+=b"
    )
    assert engine.speculative.speculative_config == {"method": "ngram", "num_speculative_tokens": 5}
    assert engine.model.hf_overrides == {"rope_scaling": {"factor": 2, "type": "yarn"}, "a": [1, "b"]}


# ---- the whole list


@pytest.fixture(scope="module")
def flags():
    (commands,) = (each for each in command_line()._actions if isinstance(each, argparse._SubParsersAction))
    return commands.choices["serve"]._option_string_actions


def test_every_flag_of_vllms_server_is_known(flags):
    wanted = [*(f"--{name}" for name in (*ENGINE, *SERVER, *EARLIER)), *SHORT]
    assert [flag for flag in wanted if flag not in flags] == []
    assert len(wanted) > 300


def test_the_table_has_no_name_that_vllm_never_had():
    python_only = {"model_weights", "mamba_config", "enable_mm_processor_stats", "enable_kv_cache_events"}
    names = {name.replace("-", "_") for name in (*ENGINE, *SERVER, *EARLIER)} | python_only
    assert (FOREIGN_OPTIONS.keys() | FOREIGN_SERVER_OPTIONS.keys()) - names == set()


@pytest.mark.parametrize("name", [name.replace("-", "_") for name in (*ENGINE, *EARLIER)])
def test_every_option_of_vllms_engine_is_a_keyword(name):
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert name in known or name in FOREIGN_SERVER_OPTIONS


@pytest.mark.parametrize("name", [*ENGINE, *SERVER, *EARLIER])
def test_every_option_of_vllms_server_is_a_key_of_a_file(name, tmp_path):
    """None takes a list of lists and an object as well: it is refused by its name, not as unknown."""
    if name in ("config", "logits-processors"):
        return
    fields, file, said = dataclasses.fields(ServerOptions), tmp_path / "server.yaml", []
    for value in ("[[1], 2]", "{x: 2}"):
        file.write_text(f"{name}: {value}\n", encoding="utf-8")
        try:
            options = read_config_file(str(file), fields, FOREIGN_SERVER_OPTIONS)
            own = {field.name for field in fields} | FOREIGN_SERVER_OPTIONS.keys()
            ServerOptions.from_options({key: each for key, each in options.items() if key in own})
            EngineConfig.from_options(**{key: each for key, each in options.items() if key not in own})
        except ConfigError as error:
            said.append(str(error))
    assert said and name.replace("-", "_") in said[0] and "unknown option" not in said[0]


def test_lists_are_understood_as_words_with_commas_and_as_json():
    server, _ = options_of("""serve M --served-model-name a b,c --allowed-origins '["d"]' --api-key k1 --api-key k2""")
    assert (server.served_model_name, server.allowed_origins, server.api_key) == (("a", "b", "c"), ("d",), ("k1", "k2"))


def test_the_seed_of_a_server_is_the_engines():
    assert options_of("serve MODEL --seed 42")[1].model.seed == 42


def test_no_option_of_the_server_is_both_ours_and_foreign():
    ours = {option.name for option in dataclasses.fields(ServerOptions)}
    assert not ours & FOREIGN_SERVER_OPTIONS.keys() and not FOREIGN_OPTIONS.keys() & FOREIGN_SERVER_OPTIONS.keys()


@pytest.mark.parametrize("name", FOREIGN_SERVER_OPTIONS)
def test_vllms_default_of_the_server_passes_and_nonsense_is_refused_by_name(name):
    assert ServerOptions.from_options({name: FOREIGN_SERVER_OPTIONS[name].default}) == ServerOptions()
    with pytest.raises(ConfigError, match=f"^{name} is "):
        ServerOptions.from_options({name: object()})


# ---- --config


@pytest.fixture
def from_file(tmp_path):
    def read(text, *words):
        (tmp_path / "server.yaml").write_text(text, encoding="utf-8")
        return options_of(shlex.join(["serve", "--config", str(tmp_path / "server.yaml"), *words]))

    return read


def test_a_file_holds_options_of_the_server_too(from_file):
    server, engine = from_file(
        "model: org/a\nhost: 0.0.0.0\nport: 9000\napi-key: [x, y]\nserved-model-name: a,b\nmax-model-len: 8k\n"
        "uvicorn_is_not: 1\n".replace("uvicorn_is_not: 1\n", "api-server-count: 1\ntrust_remote_code: false\n")
    )
    assert (server.host, server.port, server.api_key, server.served_model_name) == (
        "0.0.0.0",
        9000,
        ("x", "y"),
        ("a", "b"),
    )
    assert (engine.model.model, engine.model.max_model_len) == ("org/a", 8000)


def test_flags_and_model_win_over_the_file(from_file):
    server, engine = from_file("model: org/a\nport: 9000\nhost: 0.0.0.0\n", "--port", "9001", "--model", "org/b")
    assert (server.host, server.port, engine.model.model) == ("0.0.0.0", 9001, "org/b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 9000\n", "unknown option 'prot' in .*Did you mean 'port'"),
        ("port: many\n", "port in .*'many' is not a whole number"),
        ("port: 99999999\n", "port is 99999999"),
        ("api-server-count: 3\n", "api_server_count is 3"),
    ],
)
def test_a_wrong_option_of_the_server_in_a_file_is_named(from_file, text, said):
    with pytest.raises(ConfigError, match=said):
        from_file(text)
