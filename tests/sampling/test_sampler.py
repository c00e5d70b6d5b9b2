"""The sampling programs against plain numpy, and what a draw may and may not depend on."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxpaged.sampling.sampler import first_argmax, not_a_distribution
from jaxpaged.sampling_params import SamplingParams
from tests.sampling import oracle
from tests.sampling.programs import Engine, Request, plain, sample_plainly, vector_of

V = 37
rng = np.random.default_rng(7)
LOGITS = rng.normal(size=(4, V)).astype(np.float32) * 2


def params(**values) -> SamplingParams:
    return SamplingParams(**{"seed": 11, "logprobs": 0} | values)


def chi_square_p(tokens: np.ndarray, logits_V: np.ndarray) -> float:
    """How likely such counts are, if the tokens are drawn from softmax(logits)."""
    expected = np.exp(oracle.log_softmax(logits_V)) * len(tokens)
    counts = np.bincount(tokens, minlength=len(logits_V)).astype(float)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return chisquare(counts, expected * counts.sum() / expected.sum()).pvalue


def draws(logits_V: np.ndarray, wanted: SamplingParams, count: int = 4000) -> np.ndarray:
    """Tokens at `count` positions, 500 a step."""
    steps = []
    for first in range(0, count, 500):
        requests = [Request(wanted, prompt=[0] * position) for position in range(first, first + 500)]
        logits_SV = np.tile(logits_V, (500, 1))
        steps.append(np.asarray(sample_plainly(logits_SV, requests, bucket=500, size=500).tokens_S))
    return np.concatenate(steps)


# ---- everything, against the definition ------------------------------------------------------------

token = st.integers(0, V - 1)
penalty = st.sampled_from([0.0, 0.0, -1.5, 0.7, 2.0])
some_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 8, 9, 20, V, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.8]),
    logit_bias=st.none() | st.dictionaries(token, st.floats(-5, 5, width=32), max_size=6),
    allowed_token_ids=st.none() | st.lists(token, min_size=8, max_size=30),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(token, max_size=4),
    bad_words_token_ids=st.none() | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
    seed=st.integers(0, 2**64 - 2),
)
some_requests = st.lists(
    st.builds(
        Request, some_params, prompt=st.lists(token, max_size=6), output=st.lists(st.integers(0, 3), max_size=10)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100)
@given(some_requests, st.integers(0, 2**32 - 1))
def test_the_full_program_does_what_the_definition_says(requests, seed):
    logits_SV = np.random.default_rng(seed).normal(size=(len(requests), V)).astype(np.float32) * 3
    engine, rows = Engine(V), [5, 0, 7, 2][: len(requests)]
    for row, request in zip(rows, requests):
        engine.add(row, request)
    output = engine.sample(logits_SV, rows, requests)
    for line, request in enumerate(requests):
        edited_V = oracle.edited_logits(logits_SV[line], request.params, request.prompt, request.output)
        assert bool(output.bad_S[line]) == bool(edited_V.max() == -np.inf)
        if output.bad_S[line]:
            continue
        processed_V = oracle.processed_logits(edited_V, request.params)
        np.testing.assert_allclose(vector_of(output, line), processed_V, rtol=2e-6, atol=2e-6)
        assert int(output.tokens_S[line]) == oracle.drawn_token(processed_V, request.params, request.position)


@settings(max_examples=100)
@given(some_requests, st.integers(0, 2**32 - 1))
def test_the_plain_program_draws_what_the_definition_says(requests, seed):
    logits_SV = np.random.default_rng(seed).normal(size=(len(requests), V)).astype(np.float32) * 3
    tokens_S = sample_plainly(logits_SV, requests).tokens_S
    for line, request in enumerate(requests):
        processed_V = oracle.processed_logits(logits_SV[line], request.params)
        assert int(tokens_S[line]) == oracle.drawn_token(processed_V, request.params, request.position)


# ---- the draw ----------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_largest_logits():
    logits_SV = LOGITS.copy()
    logits_SV[1, [9, 30]] = 50.0
    tokens_S = sample_plainly(logits_SV, [Request(params(temperature=0))] * 4).tokens_S
    np.testing.assert_array_equal(tokens_S, logits_SV.argmax(axis=1))
    assert tokens_S[1] == 9


@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 4}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.5, "top_p": 0.95}]
)
def test_tokens_come_as_often_as_they_are_likely(limits):
    wanted = params(**limits)
    processed_V = oracle.processed_logits(LOGITS[0], wanted)
    assert chi_square_p(draws(LOGITS[0], wanted), processed_V) > 0.01


def test_draws_at_different_positions_are_independent():
    tokens = draws(np.zeros(V, np.float32), params(top_k=0))
    pairs = (tokens[:-1] % 6) * 6 + tokens[1:] % 6
    share = np.bincount(np.arange(V) % 6) / V
    expected = np.log(np.outer(share, share).ravel())
    assert chi_square_p(pairs, expected) > 0.01


def test_neighbouring_seeds_draw_independently():
    """Sequence i of n gets seed + i."""
    logits_V = np.zeros(V, np.float32)
    requests = [Request(params(seed=seed), prompt=[0] * 9) for seed in range(500)]
    tokens = np.asarray(sample_plainly(np.tile(logits_V, (500, 1)), requests, bucket=500, size=500).tokens_S)
    assert chi_square_p(tokens, logits_V) > 0.01


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.99}, {"min_p": 0.01, "top_k": 12}])
def test_a_draw_does_not_depend_on_row_place_bucket_or_company(limits):
    request = Request(params(**limits), prompt=[0] * 21)
    others = [Request(params(seed=3)), Request(params(seed=5, top_k=30)), Request(params(temperature=0))]
    alone = [sample_plainly(LOGITS[line : line + 1], [request]).tokens_S[0] for line in range(4)]
    for line in range(4):
        logits_SV = np.concatenate([LOGITS[[0, 1]], LOGITS[[line]], LOGITS[[3]]])
        company = [*others[:2], request, others[2]]
        assert sample_plainly(logits_SV, company, rows=[6, 1, 3, 0]).tokens_S[2] == alone[line]
        assert sample_plainly(logits_SV, company, rows=[6, 1, 3, 0], bucket=500).tokens_S[2] == alone[line]


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.99}])
def test_a_draw_does_not_depend_on_the_padding_of_the_vocabulary(limits):
    requests = [Request(params(seed=seed, **limits), prompt=[0] * seed) for seed in range(4)]
    wider = np.pad(LOGITS, ((0, 0), (0, 64 - V)), constant_values=-np.inf)
    np.testing.assert_array_equal(sample_plainly(LOGITS, requests).tokens_S, sample_plainly(wider, requests).tokens_S)


def test_the_full_program_draws_what_the_plain_one_draws():
    requests = [
        Request(params(seed=1)),
        Request(params(seed=2, top_p=0.8)),
        Request(params(seed=3, top_k=3)),
        Request(params(temperature=0)),
    ]
    engine = Engine(V)
    for row, request in enumerate(requests):
        engine.table.set(row, request.params)
    tokens_S = engine.sample(LOGITS, range(4), requests).tokens_S
    np.testing.assert_array_equal(tokens_S, sample_plainly(LOGITS, requests).tokens_S)


def test_all_64_bits_of_the_seed_count():
    seeds = [1, 1 + 2**32, 1 + 2**63, 2]
    wide = np.zeros((4, V), np.float32)
    drawn = {tuple(draws(wide[0], params(seed=seed), count=500)[:40]) for seed in seeds}
    assert len(drawn) == 4


# ---- bad logits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 17, 36, slice(None)])
def test_a_row_that_is_no_distribution_is_reported_and_harms_no_other(value, place):
    logits_SV = LOGITS.copy()
    logits_SV[1, place] = value
    requests = [Request(params(seed=line, temperature=line / 2)) for line in range(4)]
    output, clean = sample_plainly(logits_SV, requests), sample_plainly(LOGITS, requests)
    broken = np.isnan(value) or value > 0 or place == slice(None)
    assert output.bad_S.tolist() == output.corrupted_S.tolist() == [False, broken, False, False]
    if broken:
        assert output.tokens_S[1] == 0
    np.testing.assert_array_equal(np.delete(output.tokens_S, 1), np.delete(clean.tokens_S, 1))


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 32_000), (2, 2_048), (8, 1_000), (31, 133), (64, 50_257)])
def test_one_nan_among_many_logits_is_not_lost(num_rows, num_tokens):
    """XLA:CPU's maximum of so many loses it, of both signs."""
    program = jax.jit(lambda logits_SV: (not_a_distribution(logits_SV), first_argmax(logits_SV)))
    clean_SV = np.random.default_rng(num_tokens).normal(size=(num_rows, num_tokens)).astype(np.float32)
    for place in (0, num_tokens // 2, num_tokens - 1):
        for sign in (1, -1):
            logits_SV, row = clean_SV.copy(), place % num_rows
            logits_SV[row, place] = np.copysign(np.float32(np.nan), sign)
            bad_S, tokens_S = map(np.asarray, program(logits_SV))
            assert bad_S.nonzero()[0].tolist() == [row]
            np.testing.assert_array_equal(np.delete(tokens_S, row), np.delete(clean_SV.argmax(axis=1), row))


def test_the_full_program_reports_rows_that_are_no_distribution_before_or_after_processing():
    logits_SV = LOGITS.copy()
    logits_SV[0, 3] = np.nan  # hidden by allowed_token_ids, but the model has failed
    requests = [
        Request(params(allowed_token_ids=[4, 5])),
        Request(params(allowed_token_ids=[4], min_tokens=2, stop_token_ids=[4])),
        Request(params(logit_bias={5: 100.0})),
    ]
    engine = Engine(V)
    for row, request in enumerate(requests):
        engine.add(row, request)
    output = engine.sample(logits_SV[:3], range(3), requests)
    assert output.bad_S.tolist()[:3] == [True, True, False]
    assert output.corrupted_S.tolist()[:3] == [True, False, False], "the second's own parameters leave nothing"
    assert output.tokens_S.tolist()[:3] == [0, 0, 5]


# ---- nothing is compiled twice -----------------------------------------------------------------------


def test_one_program_serves_every_mix_of_parameters():
    before = plain._cache_size()
    sample_plainly(LOGITS, [Request(params(temperature=0))])
    compiled = plain._cache_size()
    for limits in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        sample_plainly(LOGITS, [Request(params(**limits))] * 3)
    assert plain._cache_size() == compiled <= before + 1
