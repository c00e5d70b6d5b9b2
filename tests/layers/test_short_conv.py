"""Short convolutions over ragged steps of several requests, from rings and snapshots, against plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.kv_cache_spec import StateArray, StateSpec
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.short_conv import Filter, short_convolution
from jaxpaged.layers.state import StateBatch, state_metadata
from jaxpaged.worker.cache.kinds import tensor_struct

WIDTH, CHANNELS, BLOCK, NUM_DRAFTS, NUM_ROWS, NUM_TOKENS, NUM_BLOCKS = 3, 8, 4, 2, 3, 8, 40
rng = np.random.default_rng(0)
WEIGHT, BIAS = rng.standard_normal((CHANNELS, WIDTH)).astype(np.float32), rng.standard_normal(CHANNELS)


def inputs_of(text: int) -> np.ndarray:
    """What 64 tokens of one text give."""
    return np.random.default_rng(text + 7).standard_normal((64, CHANNELS)).astype(np.float32)


def expected(text: int) -> np.ndarray:
    padded = np.pad(inputs_of(text), ((WIDTH - 1, 0), (0, 0)))
    return sum(padded[j : j + 64] * WEIGHT[:, j] for j in range(WIDTH)) + BIAS


class Steps:
    """One layer and its rows; every array begins as NaN, and so does the input of padding."""

    def __init__(self, num_devices: int, deterministic: bool = False, recurrence: str = "reference"):
        self.context = AttentionContext(make_mesh(num_devices), "reference", recurrence=recurrence)
        array = StateArray((WIDTH - 1, CHANNELS), "float32", split_axis=1, token_axis=0)
        spec = StateSpec(BLOCK, (array,), num_drafts=NUM_DRAFTS)
        struct = tensor_struct(self.context, spec, NUM_BLOCKS, None, num_rows=NUM_ROWS + 1)
        self.state = jax.tree.map(lambda x: jax.device_put(jnp.full(x.shape, jnp.nan, x.dtype), x.sharding), struct)
        self.tables = np.zeros((NUM_ROWS + 1, 16), np.int32)

        @jax.jit
        def step(x_TD, state, rows, starts, lengths, tables):
            places = {"num_tokens": NUM_TOKENS, "block_size": BLOCK}
            batch = StateBatch(state_metadata(rows, starts, lengths, tables, **places), self.context)
            return short_convolution(x_TD, Filter(jnp.asarray(WEIGHT), jnp.asarray(BIAS)), state, batch, deterministic)

        self._step = step

    def run(self, parts: list[tuple[int, np.ndarray, int]]) -> list[np.ndarray]:
        """`parts`: (row, inputs of its next tokens, where the first of them stands) -> what each gives."""
        x_TD = np.full((NUM_TOKENS, CHANNELS), np.nan, np.float32)
        rows, starts, lengths = np.full(4, NUM_ROWS, np.int32), np.zeros(5, np.int32), np.zeros(4, np.int32)
        for i, (row, inputs, begin) in enumerate(parts):
            rows[i], lengths[i], end = row, begin + len(inputs), starts[i] + len(inputs)
            x_TD[starts[i] : end], starts[i + 1 :] = inputs, end
        y_TD, self.state = self._step(x_TD, self.state, rows, starts, lengths, self.tables[rows])
        return [np.asarray(y_TD)[starts[i] : starts[i + 1]] for i in range(len(parts))]


@pytest.mark.parametrize("num_devices", [1, 4])
def test_ragged_steps_with_tokens_taken_back_and_beginnings_from_snapshots(num_devices):
    """Rows stand anywhere, take steps of any size or none, lose up to two of the tokens that they have computed, and
    end; a text that comes again begins behind its last snapshot. Half of the blocks have none."""
    steps, rng = Steps(num_devices), np.random.default_rng(3)
    snapshots: dict[tuple[int, int], int] = {}  # (text, index of the block) -> block
    texts, computed = [None] * NUM_ROWS, [0] * NUM_ROWS
    num_blocks, num_hits, num_lost = 1, 0, 0
    for _ in range(60):
        room, parts = NUM_TOKENS, []
        for row in rng.permutation(NUM_ROWS).tolist():
            if texts[row] is None:
                texts[row] = int(rng.integers(3))
                known = [i for text, i in snapshots if text == texts[row]]
                found = max(known, default=-1)
                computed[row], steps.tables[row] = (found + 1) * BLOCK, 0
                num_hits += found >= 0
                if found >= 0:
                    steps.tables[row, found] = snapshots[texts[row], found]
            count = min(int(rng.integers(0, 6)), room, 60 - computed[row])
            for i in range(computed[row] // BLOCK, (computed[row] + count) // BLOCK):
                if not steps.tables[row, i] and rng.random() < 0.5 and num_blocks < NUM_BLOCKS:
                    steps.tables[row, i], num_blocks = num_blocks, num_blocks + 1
            if count:
                parts.append((row, inputs_of(texts[row])[computed[row] :][:count], computed[row]))
                room -= count
        for (row, inputs, begin), given in zip(parts, steps.run(parts)):
            wrong = min(int(rng.integers(0, NUM_DRAFTS + 1)), len(inputs) - 1)
            end = begin + len(inputs)
            np.testing.assert_allclose(given, expected(texts[row])[begin:end], rtol=1e-5, atol=1e-5)
            computed[row], num_lost = end - wrong, num_lost + wrong
            for i in range(begin // BLOCK, computed[row] // BLOCK):
                if steps.tables[row, i]:
                    snapshots.setdefault((texts[row], i), int(steps.tables[row, i]))
            if computed[row] > 40 or rng.random() < 0.05:
                texts[row] = None
    assert num_hits > 5 and num_lost > 20, "the test is too easy"


def test_a_token_gives_the_same_bits_whoever_is_beside_it_and_however_its_text_is_cut():
    inputs, bits = inputs_of(0), []
    for sizes in ([8, 8], [1] * 16, [3, 5, 2, 6]):
        steps, begin, given = Steps(1, deterministic=True), 0, []
        for size in sizes:
            others = [(1, inputs_of(1)[begin : begin + 8 - size], begin)] if size < 8 else []
            given.append(steps.run([*others, (0, inputs[begin : begin + size], begin)])[-1])
            begin += size
        bits.append(np.concatenate(given))
    np.testing.assert_array_equal(bits[0], bits[1])
    np.testing.assert_array_equal(bits[0], bits[2])


def test_snapshots_are_of_full_blocks_that_have_one_also_where_places_for_them_are_few():
    tables = np.array([[5, 0, 7, 9], [0, 3, 0, 0]], np.int32)
    rows, starts, lengths = np.arange(2, dtype=np.int32), np.array([0, 13, 18]), np.array([13, 9])
    found = state_metadata(rows, starts, lengths, tables, num_tokens=64, block_size=4)
    pairs = {(int(place), int(block)) for place, block in zip(found.border_P, found.block_P) if block < 10}
    assert len(found.border_P) == 64 // 4 + 2 and pairs == {(3, 5), (11, 7), (16, 3)}
