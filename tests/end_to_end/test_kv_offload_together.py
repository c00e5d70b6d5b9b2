"""Tiers besides the device together with what else an engine does: drafts, grammars, preemption, aborts, a bundle."""

import threading

import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import compile_bundle
from jaxpaged.entrypoints.cli import main
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.sampling_params import StructuredOutputsParams
from tests.end_to_end.test_kv_offload import GREEDY, OPTIONS, PROMPTS, STORY, answers, worker_of

pytestmark = pytest.mark.slow
BOUND = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[0-9]{4,9}"))
REPEATING = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FEW_PROGRAMS = {**OPTIONS, "token_buckets": (32,), "max_num_seqs": 2}


def tokens(llm, params):
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS[1:], params, use_tqdm=False)]


def engine_of(llm):
    return llm.llm_engine._core


def nothing_is_held(llm):
    """Whoever held a block or waited for pages has gone."""
    half = engine_of(llm).transfers
    assert not half.loading and not half.is_asking and llm.reset_prefix_cache()
    return True


def test_drafts_and_grammars_go_on_behind_what_was_loaded():
    options = {**FEW_PROGRAMS, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    with LLM(**options, kv_offload="host=64M") as llm:
        expected = [tokens(llm, params) for params in (BOUND, REPEATING)]  # all computed
        assert nothing_is_held(llm)
        for params, each in zip((BOUND, REPEATING), expected):
            hits = engine_of(llm).stats().external_prefix_cache_hits
            assert tokens(llm, params) == each
            stats = engine_of(llm).stats()
            assert stats.external_prefix_cache_hits > hits and nothing_is_held(llm)
        assert stats.num_accepted_tokens and worker_of(llm).stats()["recompiles"] == 0


def slowed(worker, monkeypatch):
    """Let no page of a load come before the event that is returned is set."""
    opened, load = threading.Event(), worker.connector._load

    def wait_and_load(*load_and_readers):
        opened.wait(20)
        return load(*load_and_readers)

    monkeypatch.setattr(worker.connector, "_load", wait_and_load)
    return opened


def test_an_abort_while_pages_come_and_preemption_of_who_runs_meanwhile(monkeypatch):
    few = {**OPTIONS, "num_gpu_blocks_override": 70}
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    others = [f"{word} of the sea and of the hills. " * 3 for word in ("Tell me", "Sing", "Dream")]
    with LLM(**few, kv_offload="host=64M") as llm:
        expected, _ = answers(llm, [PROMPTS[0]])
        assert not engine_of(llm).stats().external_prefix_cache_hits and llm.reset_prefix_cache()
        worker, engine = worker_of(llm).kv_transfer, llm.llm_engine
        opened, engine_of(llm).transfers.patience = slowed(worker, monkeypatch), 60.0
        engine.add_request("gone", PROMPTS[0], GREEDY)
        engine.step()
        assert engine_of(llm).stats().num_kv_fetches == [0, 1, 0]
        engine.abort_request(["gone"])
        assert not engine.has_unfinished_requests()
        engine.add_request("kept", PROMPTS[0], GREEDY)
        for number, prompt in enumerate(others):
            engine.add_request(str(number), prompt, long)
        heard = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    heard[output.request_id] = output
            if engine_of(llm).stats().num_preemptions and heard:  # who ended has left blocks for what comes
                opened.set()
        assert engine_of(llm).stats().num_preemptions and heard["kept"].num_cached_tokens > 60
        alone = [llm.generate([prompt], long, use_tqdm=False)[0].outputs[0].token_ids for prompt in others]
        assert [heard[str(number)].outputs[0].token_ids for number in range(len(others))] == alone
        assert heard["kept"].outputs[0].token_ids == expected[0] and "gone" not in heard
        assert nothing_is_held(llm) and worker_of(llm).stats()["recompiles"] == 0


@pytest.mark.exhaustive
def test_a_bundle_has_the_copies_and_is_refused_by_an_engine_without_them(tmp_path, capsys):
    folder = tmp_path / "bundle"
    options = {**FEW_PROGRAMS, "kv_offload": "host=64M"}
    compile_bundle(EngineConfig.from_options(**options), folder)
    with LLM(**options, bundle=str(folder)) as llm:
        first, _ = answers(llm, [STORY])
        assert llm.reset_prefix_cache()
        again, cached = answers(llm, [STORY])
        stats = worker_of(llm).stats()
        assert first == again and cached[0] > 60 and stats["recompiles"] == 0 and stats["programs_from_bundle"]
    with pytest.raises((ConfigError, CheckpointError), match="kv_offload"):
        LLM(**FEW_PROGRAMS, bundle=str(folder))
    assert main(["plan", "demo", "--target", "h100", "--kv-offload", "host=1G"]) == 0
