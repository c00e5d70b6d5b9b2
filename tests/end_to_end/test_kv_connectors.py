"""A stranger's connector, from the option on the command line to the answers of the next engine."""

import json
import time
from pathlib import Path

import pytest
import yaml

from jaxpaged import LLM, SamplingParams
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import engine_options, read_config_file
from jaxpaged.entrypoints.option_flags import add_engine_flags
from jaxpaged.errors import ConfigError
from jaxpaged.kv_connector import guarded
from tests.end_to_end.test_kv_offload import worker_of
from tests.kv_connector import safetensors_folder
from tests.models.checkpoints import write_checkpoint

GUIDE = Path(__file__).parents[2] / "jaxpaged/guides/kv_connectors.md"
EXAMPLE = "tests.kv_connector.safetensors_folder:SafetensorsFolder"
FAULTY = "tests.kv_connector.test_guarded"
PROMPT = {"prompt_token_ids": [(7 * i) % 90 + 1 for i in range(75)]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama"))


def options_of(model, transfer=None, **more):
    """What the command line makes of flags."""
    parser = Parser()
    add_engine_flags(parser)
    flags = "--skip-tokenizer-init --max-model-len 128 --block-size 16 --max-num-seqs 2 --num-gpu-blocks-override 30"
    flags = [*flags.split(), "--token-buckets", "8,128", "--num-scheduler-steps", "1", "--model", model]
    if transfer is not None:
        flags += ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **transfer})]
    return engine_options(parser.parse_args(flags), {}) | more


def connector_of(name, folder, **more):
    return {"kv_connector": name, "kv_connector_extra_config": {"folder": str(folder)}, **more}


def answer(llm):
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    completion = output.outputs[0]
    steps = [{token: each.logprob for token, each in step.items()} for step in completion.logprobs or ()]
    return list(completion.token_ids), steps, output.num_cached_tokens


@pytest.fixture(scope="module")
def expected(model):
    with LLM(**options_of(model)) as llm:
        return answer(llm)[:2]


def close(found, wanted):
    return found[0] == wanted[0] and all(
        one.keys() == other.keys() and all(abs(one[token] - other[token]) < 0.01 for token in one)
        for one, other in zip(found[1], wanted[1], strict=True)
    )


def patient(llm):
    """Let it load whatever that takes."""
    transfers = llm.llm_engine._core.transfers
    transfers.rates.pays, transfers.patience = (lambda sources: True), 300.0


def test_the_next_engine_answers_from_the_folder(model, expected, tmp_path):
    named = [
        connector_of(EXAMPLE, tmp_path),
        connector_of("SafetensorsFolder", tmp_path, kv_connector_module_path=safetensors_folder.__name__),
    ]
    for number, transfer in enumerate(named):
        with LLM(**options_of(model, transfer)) as llm:
            patient(llm)
            found = answer(llm)
            assert close(found, expected) and found[2] == 64 * number
            stats = worker_of(llm).stats()
            assert stats["recompiles"] == 0 and stats["kv_connector_SafetensorsFolder_pages_read"] == 2 * number
            told = {
                (each.name, *each.labels.values()): each.value for each in llm.get_metrics() if hasattr(each, "value")
            }
            assert told["jaxpaged:kv_connector_SafetensorsFolder_pages_read",] == 2 * number
            assert told.get(("vllm:prompt_tokens_cached_by_source", "external_unspecified"), 0) == 64 * number
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_yaml_says_the_same_as_the_flag(model, tmp_path):
    transfer = connector_of(EXAMPLE, tmp_path, kv_role="kv_both")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"kv-transfer-config": transfer}), encoding="utf-8")
    file = read_config_file(str(tmp_path / "config.yaml"))
    parser = Parser()
    add_engine_flags(parser)
    of_file = engine_options(parser.parse_args([]), file)["kv_transfer_config"]
    assert of_file == options_of(model, transfer)["kv_transfer_config"] == transfer


def test_one_of_several_behind_host_memory(model, expected, tmp_path):
    """Pages that host memory has lost come from the folder."""
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}},
                connector_of(EXAMPLE, tmp_path),
            ]
        },
    }
    for number in range(2):
        with LLM(**options_of(model, several)) as llm:
            patient(llm)
            found = answer(llm)
            assert close(found, expected) and found[2] == 64 * number
    with pytest.raises(ConfigError, match="defines get_num_new_matched_tokens, and is one of several"):
        LLM(**options_of(model, connector_of(f"{FAULTY}:Talking", tmp_path), kv_offload="host=1M"))


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "recompute") for name in ("Lying", "Changing", "Forgetful", "Refusing", "Slow")), ("Changing", "fail")],
)
def test_faults_are_computed_or_fail_their_request(name, policy, model, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "CALL_SECONDS", -1.5)
    with LLM(**options_of(model, connector_of(EXAMPLE, tmp_path))) as llm:
        answer(llm)
    transfer = connector_of(f"{FAULTY}:{name}", tmp_path, kv_load_failure_policy=policy)
    with LLM(**options_of(model, transfer)) as llm:
        patient(llm)
        if policy == "fail":
            (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
            assert output.outputs[0].finish_reason == "error" and not output.outputs[0].token_ids
        begin = time.monotonic()
        found = answer(llm)
        assert close(found, expected) and found[2] == 0 and time.monotonic() - begin < 20
        assert worker_of(llm).stats()["kv_offload_pages_lost"] == 2


def test_what_is_wrong_with_a_class_is_said_before_the_engine_serves(model, tmp_path):
    for transfer, words in (
        (connector_of("no.such.module:Class", tmp_path), "cannot be opened: ModuleNotFoundError"),
        (connector_of(f"{FAULTY}:Without", tmp_path), "does not define start_load_kv, save_kv, discard"),
        ({"kv_connector": EXAMPLE}, "KeyError: 'folder'"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(**options_of(model, transfer))


def test_the_guide_shows_the_connector_that_is_tested():
    source = Path(safetensors_folder.__file__).read_text(encoding="utf-8")
    assert source[source.index("import os") :].strip() in GUIDE.read_text(encoding="utf-8")
