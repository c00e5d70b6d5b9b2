"""What a trainer is told of drawn tokens, and of those that it gives: log probabilities, and what else could come."""

import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.errors import RequestError
from tests.models.checkpoints import write_checkpoint

PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5]}
DRAW = {"max_tokens": 12, "seed": 2, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    llm = LLM(
        str(write_checkpoint("llama", tmp_path_factory.mktemp("llama"))),
        logprobs_mode="raw_and_processed_logprobs",
        enable_trace_replay=True,
        return_sampling_mask=True,
        dtype="float32",
        deterministic=True,
        max_model_len=32,
        max_num_seqs=2,
        token_buckets=(2, 16),
        num_gpu_blocks_override=32,
        num_scheduler_steps=4,
        skip_tokenizer_init=True,
    )
    yield llm
    llm.shutdown()


def answer(llm, **params):
    return llm.generate(PROMPT, SamplingParams(**DRAW | params), use_tqdm=False)[0].outputs[0]


def raw(answer):
    return np.array([line[token].logprob for line, token in zip(answer.logprobs, answer.token_ids)])


def test_without_limits_at_temperature_1_both_are_the_same(llm):
    plain = answer(llm, logprobs=0)
    processed, log_kept = np.array(plain.processed_logprobs).T
    assert np.array_equal(processed, raw(plain)) and not log_kept.any() and len(processed) == 12


def test_limits_are_undone_by_the_kept_mass(llm):
    limited = answer(llm, logprobs=20, top_k=3, top_p=0.9)
    processed, log_kept = np.array(limited.processed_logprobs).T
    np.testing.assert_allclose(processed + log_kept, raw(limited), atol=1e-5)
    assert (log_kept < -0.1).all() and (processed > raw(limited)).all()


def kept(line, params):
    """The tokens that limits leave, in the order of the vocabulary, of the 20 most likely ones: all others go."""
    ids = np.array(list(line))
    logprobs = np.array([line[token].logprob for token in ids]) / params["temperature"]
    ids, probs = ids[np.argsort(-logprobs)], np.exp(np.sort(logprobs)[::-1])
    left = (probs >= params.get("min_p", 0) * probs[0]) & (np.arange(len(ids)) < params["top_k"])
    share = probs * left / (probs * left).sum()
    left &= np.cumsum(share) - share < params.get("top_p", 1)
    return sorted(ids[left].tolist())


@pytest.mark.parametrize(
    "limits", [{"top_k": 3}, {"top_k": 9, "top_p": 0.4}, {"top_k": 20, "min_p": 0.6}], ids=lambda each: "-".join(each)
)
def test_what_limits_leave_is_told_with_each_token(llm, limits):
    limits = limits | {"temperature": 0.9}
    told = answer(llm, logprobs=20, **limits)
    assert told.sampling_mask.token_ids == [kept(line, limits) for line in told.logprobs]
    assert all(token in line for token, line in zip(told.token_ids, told.sampling_mask.token_ids, strict=True))
    assert len({len(line) for line in told.sampling_mask.token_ids}) > (limits["top_k"] != 3)
    silent = answer(llm, **limits)
    assert (silent.token_ids, silent.sampling_mask) == (told.token_ids, told.sampling_mask) and silent.logprobs is None
    chunks = list(llm.stream(PROMPT, SamplingParams(**DRAW | limits)))
    assert [line for chunk in chunks for line in chunk.sampling_mask.token_ids] == told.sampling_mask.token_ids


def test_what_limits_leave_goes_to_the_requests_that_have_some(llm):
    different = [{"top_k": 2}, {}, {"temperature": 0}, {"top_k": 4, "allowed_token_ids": [5, 6]}]
    params = [SamplingParams(**DRAW | each) for each in different]
    outputs = [output.outputs[0] for output in llm.generate([PROMPT] * 4, params, use_tqdm=False)]
    masks = [output.sampling_mask and output.sampling_mask.token_ids for output in outputs]
    assert masks == [answer(llm, top_k=2).sampling_mask.token_ids, None, None, [[5, 6]] * 12]
    assert all(map(len, masks[0])) and max(map(len, masks[0])) == 2
    for unbounded in ({"top_p": 0.9}, {"top_k": 2049, "min_p": 0.1}):
        with pytest.raises(RequestError, match="Give top_k from 1 to 2048"):
            answer(llm, **unbounded)


def test_streams_and_requests_without_log_probabilities(llm):
    chunks = list(llm.stream(PROMPT, SamplingParams(**DRAW, logprobs=1, temperature=0.7)))
    told = [pair for chunk in chunks for pair in chunk.processed_logprobs]
    assert len(chunks) > 1 and told == answer(llm, logprobs=1, temperature=0.7).processed_logprobs
    assert answer(llm).processed_logprobs is None


TRACE = [7, 0, 2, 2, 9, 11, 2, 50, 3]
"""Among them what would end a text."""


def test_given_tokens_come_with_the_log_probabilities_that_scores_have(llm):
    given = answer(llm, trace_decode_token_ids=TRACE, logprobs=0, ignore_eos=False, stop_token_ids=[9], max_tokens=2)
    assert given.token_ids == TRACE and given.finish_reason == "length"
    [scores] = llm.score_tokens(PROMPT, [TRACE], use_tqdm=False)
    assert np.array_equal(np.float32(raw(given)), scores)
    limited = answer(llm, trace_decode_token_ids=TRACE, logprobs=0, top_k=3, temperature=0.8)
    processed, log_kept = np.array(limited.processed_logprobs).T
    assert np.array_equal(raw(limited), raw(given)) and (log_kept < 0).all()
    assert np.isneginf(processed).all(), "none of these is among the three that limits leave"


def test_given_tokens_beside_drawn_ones(llm):
    together = [SamplingParams(**DRAW), SamplingParams(**DRAW, trace_decode_token_ids=TRACE, logprobs=0)]
    drawn, given = (output.outputs[0] for output in llm.generate([PROMPT] * 2, together, use_tqdm=False))
    assert drawn.token_ids == answer(llm).token_ids and given.token_ids == TRACE
    assert raw(given).tolist() == raw(answer(llm, trace_decode_token_ids=TRACE, logprobs=0)).tolist()


@pytest.mark.parametrize("wrong", [{"trace_decode_token_ids": [4] * 28}, {"trace_decode_token_ids": [10**6]}])
def test_given_tokens_that_cannot_come(llm, wrong):
    with pytest.raises(RequestError, match="28 tokens, but behind this prompt there is room for 27|token id 1000000"):
        answer(llm, **wrong)
