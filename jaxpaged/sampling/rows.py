"""Sampling parameters of the rows of one step, packed into a single float32 array [S, NUM_COLUMNS].

The host keeps one line per row, written when a request is admitted; a step's array is one fancy index plus two
columns. Whole numbers travel as the bits of a float, and the device takes the array back to int32 before anything
else, so that no float operation ever touches them.

This module does not know what the parameters mean.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import features_of

(ROW, POSITION, NUM_OUTPUT, SEED_LOW, SEED_HIGH, FLAGS, TOP_K, MIN_TOKENS) = range(8)
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
FIRST_FLOAT = 8
NUM_COLUMNS = FIRST_FLOAT + len(FLOAT_COLUMNS)


FIRST_CUSTOM_BIT = 9
MAX_CUSTOM = 31 - FIRST_CUSTOM_BIT
"""Custom processor i owns bit FIRST_CUSTOM_BIT + i; the sign bit stays free."""


class SamplingRows:
    """The host's table of sampling parameters: one line per row, and a last one for padding (row R)."""

    def __init__(self, max_num_seqs: int):
        self.null_row = max_num_seqs
        self._table = np.stack([padding_line(row) for row in range(max_num_seqs + 1)])

    def set(self, row: int, params: SamplingParams, custom_bits: int = 0) -> None:
        """Fill a line when a request is admitted. `params.seed` must be a number; `custom_bits`: see `custom.py`."""
        assert params.seed is not None, f"row {row} has no seed"
        seed = params.seed % 2**64
        line = self._table[row]
        line[SEED_LOW : SEED_HIGH + 1] = np.array([seed % 2**32, seed >> 32], np.uint32).view(np.int32)
        line[FLAGS] = features_of(params) | custom_bits
        line[TOP_K] = params.top_k
        line[MIN_TOKENS] = params.min_tokens
        line.view(np.float32)[FIRST_FLOAT:] = [getattr(params, name) for name in FLOAT_COLUMNS]

    def pack(self, rows: np.ndarray, positions: np.ndarray, num_output: np.ndarray, bucket: int) -> np.ndarray:
        """The step's array [bucket, NUM_COLUMNS], float32.

        `rows` [n] sample in this step, n <= bucket. `positions` [n] are the places in their sequences of the tokens
        to draw; `num_output` [n] counts the output tokens before them.
        """
        n = len(rows)
        packed = np.empty((bucket, NUM_COLUMNS), np.int32)
        self._table.take(rows, axis=0, out=packed[:n], mode="clip")  # "raise" would copy; the rows are ours
        packed[n:] = self._table[self.null_row]
        packed[:n, POSITION] = positions
        packed[:n, NUM_OUTPUT] = num_output
        return packed.view(np.float32)


def padding_line(row: int) -> np.ndarray:
    """The line of a row that nobody uses, as int32: it is greedy and changes nothing."""
    line = np.zeros(NUM_COLUMNS, np.int32)
    line[ROW] = row
    line.view(np.float32)[FIRST_FLOAT:] = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    return line


def placed_lines(packed_SF: jax.Array, num_computed_R: jax.Array) -> jax.Array:
    """Lines that were packed for position 0, at the positions where their rows draw next."""
    bits_SF = jax.lax.bitcast_convert_type(packed_SF, jnp.int32)
    moves_F = jnp.zeros(NUM_COLUMNS, jnp.int32).at[jnp.array([POSITION, NUM_OUTPUT])].set(1)
    placed_SF = bits_SF + num_computed_R[bits_SF[:, ROW], None] * moves_F
    return jax.lax.bitcast_convert_type(placed_SF, jnp.float32)


def lines_of_active(bits_SF: jax.Array, active_S: jax.Array, null_row: int) -> jax.Array:
    """Lines, given as int32, of which those that are not active become lines of a row that nobody uses."""
    return jax.lax.bitcast_convert_type(jnp.where(active_S[:, None], bits_SF, padding_line(null_row)), jnp.float32)


class RowParams:
    """A step's array on the device, by name: `top_k_S`, `temperature_S`, and so on, each [S].

    Columns are cut out where they are used: a branch of `lax.cond` then takes one array in, not a dozen, which
    saves a fifth of the time that it takes to compile the sampling programs.
    """

    def __init__(self, packed_SF: jax.Array):
        self.bits_SF = jax.lax.bitcast_convert_type(packed_SF, jnp.int32)

    row_S = property(lambda self: self.bits_SF[:, ROW])
    position_S = property(lambda self: self.bits_SF[:, POSITION])
    num_output_S = property(lambda self: self.bits_SF[:, NUM_OUTPUT])
    flags_S = property(lambda self: self.bits_SF[:, FLAGS])
    top_k_S = property(lambda self: self.bits_SF[:, TOP_K])
    min_tokens_S = property(lambda self: self.bits_SF[:, MIN_TOKENS])
    temperature_S = property(lambda self: self._floats_S("temperature"))
    top_p_S = property(lambda self: self._floats_S("top_p"))
    min_p_S = property(lambda self: self._floats_S("min_p"))
    repetition_penalty_S = property(lambda self: self._floats_S("repetition_penalty"))
    frequency_penalty_S = property(lambda self: self._floats_S("frequency_penalty"))
    presence_penalty_S = property(lambda self: self._floats_S("presence_penalty"))

    @property
    def seed_S2(self) -> jax.Array:
        """The low and the high 32 bits, uint32."""
        return jax.lax.bitcast_convert_type(self.bits_SF[:, SEED_LOW : SEED_HIGH + 1], jnp.uint32)

    @property
    def random_S(self) -> jax.Array:
        """Rows that draw; the others are greedy."""
        return self.temperature_S > 0

    @property
    def limited_S(self) -> jax.Array:
        """Rows that draw, and not from the whole vocabulary."""
        return self.random_S & ((self.top_k_S > 0) | (self.top_p_S < 1.0) | (self.min_p_S > 0.0))

    def has(self, feature: int) -> jax.Array:
        """Which rows use a feature, or a custom processor's bit."""
        return (self.flags_S & int(feature)) != 0

    def _floats_S(self, name: str) -> jax.Array:
        column_S = self.bits_SF[:, FIRST_FLOAT + FLOAT_COLUMNS.index(name)]
        return jax.lax.bitcast_convert_type(column_S, jnp.float32)


def unpack_rows(packed_SF: jax.Array) -> RowParams:
    return RowParams(packed_SF)
