"""Rows become chunks of rows: against a loop over tokens, and attention over them against one softmax a query."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.chunks import rows_of_chunks
from pallas_kernels.testing import run_once
from tests.pallas_kernels.ragged_paged_attention.one_step import packed

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
    contexts = rng.normal(size=(2, 3, 80, 1, dim)).astype(np.float32)  # keys and values of all positions of all rows
    q = rng.normal(size=(num_tokens, heads, dim)).astype(np.float32)
    caches, new_kv = np.zeros((2, 40, 1, BLOCK, dim), np.float32), np.zeros((2, num_tokens, 1, dim), np.float32)
    for r, (cached, new) in enumerate(rows):
        position = np.arange(cached)
        caches[:, tables[r, position // BLOCK], :, position % BLOCK] = contexts[:, r, :cached].swapaxes(0, 1)
        new_kv[:, starts[r] : starts[r] + new] = contexts[:, r, cached : cached + new]

    def attend(q, new_k, new_v, kv, *where):
        metadata = rpa.make_metadata(
            3, *where, num_tokens=num_tokens, block_size=BLOCK, window=None, backend=backend, chunk=chunk
        )
        return rpa.ragged_paged_attention(q, new_k, new_v, kv, metadata, scale=0.3, backend=backend)

    out, _ = run_once(attend, q, *new_kv, packed(*caches, jnp.float32, backend), starts, lens, tables)
    for r, (cached, new) in enumerate(rows):
        for i in range(new):
            position = cached + i
            seen = slice(position // chunk * chunk, position + 1)
            keys, values = contexts[:, r, seen, 0]
            weights = np.exp(0.3 * q[starts[r] + i].astype(np.float64) @ keys.T)
            expected = weights @ values / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(out[starts[r] + i], expected, rtol=2e-4, atol=2e-5)
