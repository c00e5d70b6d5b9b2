"""With `deterministic`, a request's tokens and log probabilities are the same bits whatever happens around it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged import LLM, SamplingParams

OPTIONS = {"max_num_seqs": 8, "max_model_len": 128, "block_size": 8, "max_logprobs": 2}
# In the second engine prompts are cut and, with few blocks, requests are preempted.
ROOMY = {"max_num_batched_tokens": 128, "token_buckets": (128,), "enable_prefix_caching": False}
TIGHT = {"max_num_batched_tokens": 32, "token_buckets": (8, 32), "num_gpu_blocks_override": 56}


def some_requests(count):
    """Prompts of any length, some with a beginning in common, and what is asked of them."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 2000) for _ in range(40)]
    requests = []
    for seed in range(count):
        prompt = shared[: rng.choice([0, 24, 40])] + [rng.randrange(3, 2000) for _ in range(rng.choice([2, 9, 50]))]
        more = {"prompt_logprobs": 1} if seed % 2 else {"top_p": 0.9}
        wanted = {"temperature": rng.choice([0.0, 1.0]), "max_tokens": rng.randint(3, 24), "logprobs": 2, **more}
        requests.append((prompt, SamplingParams(seed=seed, ignore_eos=True, **wanted)))
    return requests


REQUESTS = some_requests(10)


def answers(llm, requests):
    """Everything that a request gets back, of all of them at once."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [
        (output.outputs[0].token_ids, values(output.outputs[0].logprobs), values(output.prompt_logprobs or []))
        for output in outputs
    ]


def values(lines):
    return [{token: (entry.logprob, entry.rank) for token, entry in (line or {}).items()} for line in lines]


@pytest.fixture(scope="module")
def alone():
    """Each request's answer when nobody else is there and its prompt is computed in one piece."""
    with LLM("demo", deterministic=True, **OPTIONS, **ROOMY) as llm:
        return [answers(llm, [request])[0] for request in REQUESTS]


@pytest.fixture(scope="module")
def tight():
    with LLM("demo", deterministic=True, **OPTIONS, **TIGHT) as llm:
        yield llm


@settings(max_examples=6)
@given(order=st.lists(st.integers(0, len(REQUESTS) - 1), min_size=2, max_size=14), forget=st.booleans())
def test_any_company_any_chunks_and_any_cached_prefix_give_the_same_bits(alone, tight, order, forget):
    if forget:
        tight.reset_prefix_cache()
    assert answers(tight, [REQUESTS[i] for i in order]) == [alone[i] for i in order]


def test_preemption_gives_the_same_bits(alone, tight):
    before = tight.llm_engine.metrics.stats.num_preemptions
    order = [*range(len(REQUESTS)), *range(len(REQUESTS))]
    assert answers(tight, [REQUESTS[i] for i in order]) == [alone[i] for i in order]
    assert tight.llm_engine.metrics.stats.num_preemptions > before, "the test is too easy"
