"""Zero recompiles by construction, on random traffic with every kind of request."""

import random

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import RequestError
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.pooling_checkpoints import write_tokenizer


def random_params(rng: random.Random) -> SamplingParams:
    """Any mix of sampling parameters, those of the full sampling program included."""
    options = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice([0.0, 0.7, 1.3])}
    choices = {
        "top_p": 0.8,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "logit_bias": {5: 4.0},
        "min_tokens": 1,
        "allowed_token_ids": [5, 6, 7, 8],
        "bad_words": ["w9"],
        "stop": ["w7"],
        "ignore_eos": True,
        "n": 2,
    }
    for name in rng.sample(sorted(choices), rng.choice([0, 0, 1, 2, 4])):
        options[name] = choices[name]
    if options.get("n") == 2 and options["temperature"] == 0.0:
        del options["n"]
    return SamplingParams(**options)


def random_prompt(rng: random.Random, shared: list[int]) -> list[int]:
    """Token ids of any length, often with a beginning that others share."""
    start = shared[: rng.choice([0, 0, 20, 60])]
    return [*start, *(rng.randrange(200) for _ in range(rng.randint(1, 50)))]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [400, pytest.param(2000, marks=pytest.mark.exhaustive)])  # 2000 take 140 s
def test_nothing_is_compiled_after_warm_up_in_random_steps(num_steps, tmp_path):
    rng = random.Random(0)
    shared = [rng.randrange(200) for _ in range(60)]
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "token_buckets": (2, 8, 32),
        "max_model_len": 128,
        "num_gpu_blocks_override": 80,
        "block_size": 8,
    }
    write_checkpoint("gemma2", tmp_path)
    write_tokenizer(tmp_path, CONFIGS["gemma2"]["vocab_size"])
    with LLM(str(tmp_path), **options) as llm:
        engine = llm.llm_engine
        llm.wait_for_programs()
        before = engine.executor_stats()["recompiles"]
        live, finished, ids = [], 0, 0
        for _ in range(num_steps):
            while rng.random() < 0.3 and len(live) < 20:
                ids += 1
                engine.add_request(str(ids), {"prompt_token_ids": random_prompt(rng, shared)}, random_params(rng))
                live.append(str(ids))
            if live and rng.random() < 0.03:
                engine.abort_request([live.pop(rng.randrange(len(live)))])
            for output in engine.step():
                if output.finished and output.request_id in live:
                    live.remove(output.request_id)
                    finished += 1
        metrics = engine.executor_stats()
        assert metrics["recompiles"] == before == 0
        assert metrics["steps"] > num_steps // 2
        assert finished > num_steps // 20


def test_a_request_that_is_refused_compiles_nothing_and_harms_nobody(llm):
    engine = llm.llm_engine
    with pytest.raises(RequestError, match="max_model_len"):
        engine.add_request("too long", {"prompt_token_ids": [5] * 5000}, SamplingParams())
    assert not engine.has_unfinished_requests()
    assert llm.generate("Hello", SamplingParams(max_tokens=2, temperature=0.0))[0].finished


def test_a_decode_step_moves_two_arrays_to_the_device_and_none_by_accident(llm, monkeypatch):
    engine, device = llm.llm_engine, llm.llm_engine._core.executor.worker.device
    moved, call = [], device.call

    def counting(key, *arguments):
        moved.extend(array for array in arguments if isinstance(array, np.ndarray))
        return call(key, *arguments)

    monkeypatch.setattr(device, "call", counting)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=12, ignore_eos=True))
    before = device.counts.steps
    with jax.transfer_guard("disallow"):
        while engine.has_unfinished_requests():
            engine.step()
    assert 0 < len(moved) <= 2 * (device.counts.steps - before)  # steps that run together move less
