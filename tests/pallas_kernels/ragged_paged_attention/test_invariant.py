"""Invariant attention: the same bits for a query however the tokens of its request are cut into steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention import invariant

K, H, S, LENGTH, OTHER = 2, 16, 16, 150, 37


def outputs(backend, dtype, group_size, window, sizes, both_ways=None):
    """Attention of one request of LENGTH tokens, `sizes` of them a step, beside another's decode: [LENGTH, N, H]. Those
    at positions [begin, end), `both_ways`, see each other."""
    rng = np.random.default_rng(0)
    T, N = max(sizes) + 1, K * group_size
    shapes = ((LENGTH, N, H), (LENGTH, K, H), (LENGTH, K, H))
    q, k, v = (jnp.asarray(2 * rng.standard_normal(shape, np.float32), dtype) for shape in shapes)
    tables = jnp.asarray(rng.permutation(2 * 10).reshape(2, 10), jnp.int32)

    @jax.jit
    def step(q, k, v, kv, new, length, ends_T):
        metadata = rpa.make_metadata(
            2,
            jnp.stack([0, 1, 1 + new]),
            jnp.stack([OTHER, length]),
            tables,
            num_tokens=T,
            block_size=S,
            window=window,
            backend=backend,
            visible_end_T=ends_T,
        )
        return rpa.ragged_paged_attention(q, k, v, kv, metadata, scale=0.3, window=window, backend=backend)

    kv, done, results = rpa.kv_zeros(20, S, K, H, dtype, backend), 0, []
    for size in sizes:
        place = slice(done, done + size)
        padded = [jnp.zeros((T, *x.shape[1:]), dtype).at[1 : 1 + size].set(x[place]) for x in (q, k, v)]
        ends_T = None
        if both_ways:
            begin, end = both_ways
            position_T = np.arange(done - 1, done - 1 + T)
            ends_T = np.where((position_T >= begin) & (position_T < end), end, position_T + 1)
            ends_T[0] = OTHER
        out, kv = step(*padded, kv, jnp.int32(size), jnp.int32(done + size), ends_T)
        results.append(np.asarray(out[1 : 1 + size].astype(jnp.float32)))
        done += size
    return np.concatenate(results)


def cut(size):
    return [size] * (LENGTH // size) + ([LENGTH % size] if LENGTH % size else [])


@pytest.mark.parametrize(
    ("dtype", "group_size", "window"),
    [
        pytest.param(jnp.bfloat16, 1, None, marks=pytest.mark.exhaustive),
        (jnp.bfloat16, 3, 70),
        (jnp.float32, 2, None),
    ],
)
def test_a_prompt_in_one_piece_in_chunks_and_token_by_token(dtype, group_size, window):
    whole = outputs("invariant", dtype, group_size, window, cut(LENGTH))
    for size in (64, 1):
        np.testing.assert_array_equal(outputs("invariant", dtype, group_size, window, cut(size)), whole)
    plain = outputs("reference", dtype, group_size, window, cut(LENGTH))
    np.testing.assert_allclose(whole, plain, rtol=0.02, atol=0.02 if dtype == jnp.bfloat16 else 1e-5)


def test_a_picture_whose_tokens_see_each_other_both_ways_after_few_and_after_many():
    settings = jnp.float32, 2, 30
    whole = outputs("invariant", *settings, [LENGTH], both_ways=(45, 100))
    for sizes in ([45, 55, 50], [*[5] * 9, 55, 1, 1, 1, 47]):
        np.testing.assert_array_equal(outputs("invariant", *settings, sizes, both_ways=(45, 100)), whole)
    assert np.abs(whole - outputs("invariant", *settings, [LENGTH])).max() > 0.01


def test_the_plain_reference_would_fail_this():
    whole = outputs("reference", jnp.float32, 2, None, cut(LENGTH))
    assert not np.array_equal(outputs("reference", jnp.float32, 2, None, cut(1)), whole)


def test_parts_are_merged_by_powers_of_two_that_are_exact():
    exponents = jnp.asarray([0.0, -1.0, -126.0, -127.0, -1e30])
    np.testing.assert_array_equal(invariant.power_of_two(exponents), [1, 0.5, 2.0**-126, 0, 0])
