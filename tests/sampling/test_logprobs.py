"""Log probabilities and ranks, of drawn tokens and of prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling.logprobs import prompt_logprobs
from jaxpaged.sampling_params import SamplingParams
from tests.sampling import oracle
from tests.sampling.programs import Engine, Request

V = 37
LOGITS = np.random.default_rng(5).normal(size=(3, V)).astype(np.float32) * 2
BIASED = SamplingParams(seed=4, logprobs=3, logit_bias={7: 4.0, 9: -2.0}, temperature=0.5, top_k=6)


def sample(requests: list[Request], mode: str):
    engine = Engine(V)
    for row, request in enumerate(requests):
        engine.add(row, request)
    return engine.sample(LOGITS, range(len(requests)), requests, logprobs_mode=mode)


def expected_values(line: int, params: SamplingParams, mode: str) -> np.ndarray:
    logits_V = LOGITS[line]
    if mode.startswith("processed"):
        logits_V = oracle.processed_logits(oracle.edited_logits(logits_V, params, [], []), params)
    return oracle.log_softmax(logits_V) if mode.endswith("logprobs") else logits_V


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_each_mode_shows_its_values(mode):
    greedy = SamplingParams(seed=4, logprobs=3, temperature=0, logit_bias={30: 9.0})
    requests = [Request(BIASED), Request(greedy), Request(SamplingParams(seed=9, logprobs=0))]
    output = sample(requests, mode)
    for line, request in enumerate(requests):
        values_V = expected_values(line, request.params, mode)
        token = int(output.tokens_S[line])
        ids = np.asarray(output.logprobs.token_ids_SJ)[line]
        assert ids[0] == token
        finite = np.isfinite(np.sort(values_V)[::-1])
        np.testing.assert_array_equal(ids[1:][finite], np.argsort(-values_V, kind="stable")[finite])
        np.testing.assert_allclose(output.logprobs.logprobs_SJ[line], values_V[ids], rtol=1e-5, atol=1e-5)
        assert output.logprobs.ranks_S[line] == 1 + (values_V > values_V[token]).sum()


def test_raw_ones_with_the_processed_one_and_the_kept_mass_beside_them():
    nucleus = SamplingParams(seed=2, logprobs=0, temperature=1.5, top_p=0.7, min_p=0.01, presence_penalty=1.0)
    requests = [Request(BIASED), Request(nucleus), Request(SamplingParams(seed=9, logprobs=0))]
    output, raw = (sample(requests, mode) for mode in ("raw_and_processed_logprobs", "raw_logprobs"))
    assert output.tokens_S.tolist() == raw.tokens_S.tolist() and raw.logprobs.processed_S2 is None
    np.testing.assert_array_equal(output.logprobs.logprobs_SJ, raw.logprobs.logprobs_SJ)
    for line, request in enumerate(requests):
        token, params = int(output.tokens_S[line]), request.params
        edited_V = oracle.edited_logits(LOGITS[line], params, [], [])
        limited = oracle.log_softmax(oracle.processed_logits(edited_V, params))[token]
        whole = oracle.log_softmax(edited_V / params.temperature)[token]
        processed, log_kept = output.logprobs.processed_S2[line].tolist()
        assert (processed, processed + log_kept) == pytest.approx((limited, whole), abs=1e-5)
        assert log_kept == 0.0 if line == 2 else log_kept < 0


def test_chosen_tokens_replace_the_most_likely_ones():
    chosen, likely = SamplingParams(seed=1, logprob_token_ids=[30, 2, 11]), SamplingParams(seed=2, logprobs=2)
    requests = [Request(chosen), Request(likely)]
    output = sample(requests, "raw_logprobs")
    assert output.logprobs.token_ids_SJ[0, 1:4].tolist() == [30, 2, 11]
    expected = expected_values(0, chosen, "raw_logprobs")[[30, 2, 11]]
    np.testing.assert_allclose(output.logprobs.logprobs_SJ[0, 1:4], expected, rtol=1e-5)
    assert output.logprobs.token_ids_SJ[1, 1:3].tolist() == np.argsort(-LOGITS[1])[:2].tolist()


def test_tokens_of_equal_probability_have_the_same_rank():
    logits_CV = np.zeros((4, V), np.float32)
    logits_CV[:, [3, 8]] = 2.0
    logits_CV[:, 5] = 1.0
    ranks = prompt_logprobs(jnp.asarray(logits_CV), jnp.array([3, 8, 5, 0]), 5).ranks_S
    assert ranks.tolist() == [1, 1, 3, 4]


@pytest.mark.parametrize(("mode", "count"), [("raw_logprobs", 5), ("processed_logits", 5), ("raw_logprobs", 0)])
def test_prompt_tokens_have_the_layout_of_drawn_ones(mode, count):
    targets = np.array([4, 36, 0])
    program = jax.jit(prompt_logprobs, static_argnames=("max_logprobs", "logprobs_mode"))
    output = program(LOGITS, targets, max_logprobs=count, logprobs_mode=mode)
    for line, target in enumerate(targets):
        values_V = oracle.log_softmax(LOGITS[line]) if mode.endswith("logprobs") else LOGITS[line]
        ids = [target, *np.argsort(-values_V)[:count]]
        assert output.token_ids_SJ[line].tolist() == ids
        np.testing.assert_allclose(output.logprobs_SJ[line], values_V[ids], rtol=1e-5)
        assert output.ranks_S[line] == 1 + (values_V > values_V[target]).sum()
