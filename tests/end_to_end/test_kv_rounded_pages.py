"""Pages of 8 bits: half the bytes, the same text in ordinary cases, and found by no engine that keeps exact ones."""

import pytest

from jaxpaged import LLM
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import compile_bundle
from jaxpaged.errors import CheckpointError, ConfigError, PageError
from tests.end_to_end.test_kv_offload import GREEDY, OPTIONS, PROMPTS, STORY, answers, worker_of
from tests.end_to_end.test_kv_offload_together import FEW_PROGRAMS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected():
    with LLM(**OPTIONS) as llm:
        return answers(llm)[0]


def pages_in(folder):
    return {path.stat().st_size for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.exhaustive)])
def test_rounded_pages_are_half_as_large_and_give_the_same_text(form, expected, tmp_path):
    options = {**OPTIONS, "kv_offload": f"host=64M,disk={tmp_path}:256M,pages={form}"}
    with LLM(**options) as llm:
        assert answers(llm)[0] == expected
        assert llm.reset_prefix_cache()
        again, cached = answers(llm)
        assert again == expected and min(cached) > 60
        assert llm.save_prefix(PROMPTS[0], tmp_path / "x").num_tokens > 60
        assert worker_of(llm).stats()["recompiles"] == 0
    rounded = pages_in(tmp_path)
    with LLM(**{**options, "tensor_parallel_size": 2}) as llm:  # after a restart
        again, cached = answers(llm)
        assert again == expected and max(cached) > 60
    with LLM(**{**options, "kv_offload": f"disk={tmp_path}:256M"}) as llm:
        again, cached = answers(llm)
        assert again == expected and worker_of(llm).stats()["kv_offload_pages_loaded"] == 0, "other pages were found"
        with pytest.raises(PageError, match="namespace"):
            llm.load_prefix(tmp_path / "x")
    exact = pages_in(tmp_path) - rounded
    assert 0.4 < max(rounded) / max(exact) < 0.6
    with LLM(**{**options, "kv_offload": f"host=64M,pages={form}"}) as llm:
        info = llm.load_prefix(tmp_path / "x")
        (result,) = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert [*result.outputs[0].token_ids] == expected[0] and result.num_cached_tokens == info.num_tokens


@pytest.mark.exhaustive
def test_a_bundle_has_the_copies_of_one_form_of_pages(tmp_path):
    options, folder = {**FEW_PROGRAMS, "kv_offload": "host=64M,pages=int8"}, tmp_path / "bundle"
    compile_bundle(EngineConfig.from_options(**options), folder)
    with LLM(**options, bundle=str(folder)) as llm:
        first, _ = answers(llm, [STORY])
        assert llm.reset_prefix_cache()
        again, cached = answers(llm, [STORY])
        assert first == again and cached[0] > 60 and worker_of(llm).stats()["recompiles"] == 0
    with pytest.raises((ConfigError, CheckpointError), match="kv_offload"):
        LLM(**{**options, "kv_offload": "host=64M"}, bundle=str(folder))


def test_an_engine_that_promises_bits_refuses_to_round():
    with pytest.raises(ConfigError, match="pages=int8, which rounds.*deterministic"):
        LLM(**OPTIONS, deterministic=True, kv_offload="host=64M,pages=int8")
