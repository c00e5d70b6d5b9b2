"""Order and memory of what changes logits; each change by its definition is in test_sampler.py."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.sampling.logits import apply_bitmask
from jaxpaged.sampling_params import SamplingParams
from tests.sampling import oracle
from tests.sampling.programs import Engine, Request, vector_of

V = 37
LOGITS = np.random.default_rng(3).normal(size=(4, V)).astype(np.float32) * 2
NINF = -np.inf


def params(**values) -> SamplingParams:
    return SamplingParams(**{"seed": 11, "logprobs": 0, "temperature": 0} | values)


def processed(logits_V: list[float], request: Request) -> list[float]:
    """What the full program makes of a few logits."""
    full_V = np.full(V, -50.0, np.float32)
    full_V[: len(logits_V)] = logits_V
    engine = Engine(V)
    engine.add(1, request)
    return vector_of(engine.sample(full_V[None], [1], [request]), 0)[: len(logits_V)].tolist()


def test_the_bias_comes_before_the_repetition_penalty():
    assert processed([1.0], Request(params(logit_bias={0: 3.0}, repetition_penalty=2.0), prompt=[0])) == [2.0]


def test_the_bias_decides_on_which_side_of_zero_the_penalty_acts():
    assert processed([1.0], Request(params(logit_bias={0: -3.0}, repetition_penalty=2.0), prompt=[0])) == [-4.0]


def test_the_repetition_penalty_comes_before_the_other_penalties():
    wanted = params(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5)
    assert processed([4.0, 4.0, 4.0], Request(wanted, prompt=[0], output=[1, 1])) == [2.0, -0.5, 4.0]


def test_a_bias_does_not_bring_back_a_token_that_is_not_allowed():
    assert processed([1.0, 1.0], Request(params(allowed_token_ids=[1], logit_bias={0: 100.0}))) == [NINF, 1.0]


def test_a_bias_does_not_bring_back_a_stop_token_before_min_tokens():
    wanted = params(min_tokens=2, stop_token_ids=[0], logit_bias={0: 100.0})
    assert processed([1.0, 1.0], Request(wanted, output=[1])) == [NINF, 1.0]
    assert processed([1.0, 1.0], Request(wanted, output=[1, 1])) == [101.0, 1.0]


def test_min_p_comes_before_top_k_and_top_k_before_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    wanted = params(temperature=1, min_p=0.6, top_k=3, top_p=0.55)
    # min_p keeps 0.4 and 0.3. Of 0.7 the first has 0.571, more than top_p: it stays alone. Of all it has only 0.4.
    assert processed(logits, Request(wanted))[1:] == [NINF] * 3


def test_the_temperature_comes_before_min_p():
    logits = [1.0, 0.0]
    assert processed(logits, Request(params(temperature=1, min_p=0.3)))[1] == 0.0
    assert processed(logits, Request(params(temperature=0.5, min_p=0.3)))[1] == NINF


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], [9]),
        ([1], [9, 2]),
        ([5, 1], [9, 2]),
        ([1, 2], [9, 3]),
        ([1, 2, 1], [9, 2]),
        ([2, 1, 2], [9, 3]),
        ([2], [9]),
    ],
)
def test_bad_words_are_banned_by_their_last_token_where_the_output_began_them(output, banned):
    request = Request(params(bad_words_token_ids=[[1, 2, 3], [1, 2], [9]]), prompt=[1, 2], output=output)
    values = processed([0.0] * 12, request)
    # [1, 2] is banned by 2, which also forbids what [1, 2, 3] begins with, once 1 is there.
    assert [token for token, value in enumerate(values) if value == NINF] == sorted(banned)


def test_the_longest_bad_word_needs_all_of_its_tokens():
    word = [token % 5 for token in range(128)]
    request = Request(params(bad_words_token_ids=[word]), output=word[:-1])
    assert processed([0.0] * 5, request)[word[-1]] == NINF
    almost = [4, *word[1:-1]]
    assert processed([0.0] * 5, Request(request.params, output=almost)) == [0.0] * 5


def test_what_was_drawn_counts_in_the_next_step():
    wanted = params(frequency_penalty=1.5, repetition_penalty=1.2, bad_words_token_ids=[[1, 2], [2, 1], [3, 3]])
    requests = [Request(wanted, prompt=[5, 6]), Request(wanted, prompt=[7])]
    engine, rows = Engine(V), [3, 6]
    for row, request in zip(rows, requests):
        engine.add(row, request)
    logits_SV = np.full((2, V), -20.0, np.float32)
    logits_SV[:, :4] = [[0.0, 3.0, 2.9, 2.0], [0.0, 1.0, 2.0, 3.0]]
    for _ in range(12):
        output = engine.sample(logits_SV, rows, requests)
        for line, request in enumerate(requests):
            edited_V = oracle.edited_logits(logits_SV[line], request.params, request.prompt, request.output)
            np.testing.assert_allclose(vector_of(output, line), edited_V, rtol=1e-6, atol=1e-6)
            request.output.append(int(output.tokens_S[line]))


def test_a_preempted_request_goes_on_as_if_it_had_not_been():
    wanted = params(temperature=1, presence_penalty=0.8, bad_words_token_ids=[[1, 2]], min_tokens=4, stop_token_ids=[0])
    kept, moved = Request(wanted, [3, 4], []), Request(wanted, [3, 4], [])
    engine = Engine(V)
    engine.add(0, kept)
    engine.add(1, moved)
    for step in range(6):
        if step == 3:
            engine.add(5, moved)  # a new row, written from prompt and output
        rows = [0, 1] if step < 3 else [0, 5]
        output = engine.sample(np.tile(LOGITS[0], (2, 1)), rows, [kept, moved])
        np.testing.assert_array_equal(vector_of(output, 0), vector_of(output, 1))
        kept.output.append(int(output.tokens_S[0]))
        moved.output.append(int(output.tokens_S[1]))
    assert kept.output == moved.output


def test_a_row_that_was_not_written_ignores_its_last_owner():
    """Rows that need nothing of the full program are not uploaded, and may sample beside rows that need it."""
    owner = Request(
        params(
            presence_penalty=2.0,
            logit_bias={1: 50.0},
            allowed_token_ids=[1, 2],
            bad_words_token_ids=[[2]],
            min_tokens=9,
            stop_token_ids=[3],
        ),
        prompt=[1, 2],
        output=[2],
    )
    engine = Engine(V)
    engine.add(4, owner)
    newcomer = Request(params())
    engine.table.set(4, newcomer.params)
    output = engine.sample(LOGITS[:1], [4], [newcomer])
    np.testing.assert_array_equal(vector_of(output, 0), LOGITS[0])


@pytest.mark.parametrize("size", [5, 32, 37, 64])
def test_a_bitmask_keeps_the_tokens_whose_bit_is_set(size):
    allowed = np.random.default_rng(size).random((2, size)) < 0.5
    bits = np.packbits(np.pad(allowed, ((0, 0), (0, -size % 32))), axis=1, bitorder="little").view("<u4")
    masked = apply_bitmask(jnp.zeros((2, size)), jnp.asarray(bits))
    np.testing.assert_array_equal(np.isfinite(masked), allowed)


def test_the_grammar_mask_comes_first_and_shows_even_in_raw_values():
    request = Request(params(logit_bias={1: 100.0}, logprobs=0))
    engine = Engine(V)
    engine.add(0, request)
    bits = np.full((4, 2), 0xFFFFFFFF, np.uint32)
    bits[0, 0] &= ~np.uint32(0b11)  # neither token 0 nor token 1
    output = engine.sample(LOGITS, [0], [request], logprobs_mode="raw_logits", mask_bits_SW=bits)
    raw_V = vector_of(output, 0)
    assert raw_V[:2].tolist() == [NINF, NINF]
    np.testing.assert_array_equal(raw_V[2:], LOGITS[0, 2:])
    assert output.tokens_S[0] == 2 + LOGITS[0, 2:].argmax()
