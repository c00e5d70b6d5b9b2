"""Rows become chunks of rows: against a loop over tokens, and attention over them against one softmax a query."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.chunks import rows_of_chunks

BLOCK = 16
# (cached, new) tokens of rows: borders before, within and behind what is new; a row that has nothing to do; decodes.
STEPS = {
    "borders everywhere": ((0, 70), (31, 2), (32, 1), (0, 0), (63, 34), (95, 1)),
    "decodes": ((0, 1), (31, 1), (32, 1), (100, 1)),
    "more borders than rows": ((15, 98),),
}


def step_of(rows, num_tokens, num_rows):
    new = [n for _, n in rows] + [0] * (num_rows - len(rows))
    lens = [cached + n if n else 0 for cached, n in rows] + [0] * (num_rows - len(rows))
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    tables = np.arange(1, 1 + num_rows * 8, dtype=np.int32).reshape(num_rows, 8)
    return starts, np.array(lens, np.int32), tables


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("chunk", [16, 32, 256])
def test_every_token_is_in_the_row_of_its_chunk(name, chunk):
    rows, is_decode = STEPS[name], name == "decodes"
    num_tokens = 4 if is_decode else 112
    starts, lens, tables = step_of(rows, num_tokens, max(len(rows), 4))
    found = rows_of_chunks(
        jnp.asarray(starts),
        jnp.asarray(lens),
        jnp.asarray(tables),
        num_tokens=num_tokens,
        block_size=BLOCK,
        chunk=chunk,
        decodes_only=is_decode,
    )
    num_seqs, start_C1, length_C, table_CM = map(np.asarray, found)
    assert start_C1[-1] == starts[-1]
    assert not length_C[num_seqs:].any()
    assert all(start_C1[num_seqs:] == starts[-1])
    for r, (cached, new) in enumerate(rows):
        for i in range(new):
            token, position = starts[r] + i, cached + i
            c = np.searchsorted(start_C1[:num_seqs], token, side="right") - 1
            begin = position // chunk * chunk
            there = length_C[c] - (start_C1[c + 1] - token)  # its position in the row that is a chunk
            assert there == position - begin
            assert table_CM[c, there // BLOCK] == tables[r, position // BLOCK]


@pytest.mark.parametrize("backend", ["reference", pytest.param("tpu-interpret", marks=pytest.mark.slow)])
def test_attention_sees_its_chunk_and_nothing_before(backend):
    rows, chunk, heads, dim = ((30, 4), (64, 1), (5, 30)), 32, 2, 16
    num_tokens, rng = 40, np.random.default_rng(0)
    starts, lens, tables = step_of(rows, num_tokens, 4)
    keys, values = rng.normal(size=(2, 3, 80, 1, dim)).astype(np.float32)  # of all positions of all rows
    kv, out = rpa.kv_zeros(40, BLOCK, 1, dim, jnp.float32, backend), None
    q = rng.normal(size=(num_tokens, heads, dim)).astype(np.float32)
    for part in ("cached", "new"):
        counts = [(0, cached) if part == "cached" else (cached, new) for cached, new in rows]
        size = 128 if part == "cached" else num_tokens
        starts, lens, tables = step_of(counts, size, 4)
        new_kv = [np.zeros((size, 1, dim), np.float32) for _ in "kv"]
        for r, (begin, count) in enumerate(counts):
            for whole, step in zip((keys, values), new_kv):
                step[starts[r] : starts[r] + count] = whole[r, begin : begin + count]
        metadata = rpa.make_metadata(
            3, starts, lens, tables, num_tokens=size, block_size=BLOCK, window=None, backend=backend, chunk=chunk
        )
        queries = q if part == "new" else np.zeros((size, heads, dim), np.float32)
        out, kv = rpa.ragged_paged_attention(
            jnp.asarray(queries), *map(jnp.asarray, new_kv), kv, metadata, scale=0.3, backend=backend
        )
    for r, (cached, new) in enumerate(rows):
        for i in range(new):
            position = cached + i
            seen = slice(position // chunk * chunk, position + 1)
            weights = np.exp(0.3 * q[starts[r] + i].astype(np.float64) @ keys[r, seen, 0].T)
            expected = weights @ values[r, seen, 0] / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(out[starts[r] + i], expected, rtol=2e-4, atol=2e-5)
