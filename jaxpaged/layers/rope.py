"""Rotary position embedding and the ways to stretch it beyond the length that a model was trained on.

Formulas: RoFormer (arXiv 2104.09864); linear: positional interpolation (2306.15595); dynamic: NTK-aware scaling;
yarn: 2309.00071; longrope: 2402.13753; llama3: the frequency bands of Llama 3.1. Constants are numpy, computed
while a program is traced; angles are float32. Two scalings depend on how long a sequence may become: see
`inverse_frequencies`. This module knows no model and no config.json.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

CosSin = tuple[jax.Array, jax.Array]
"""Of the angles of a step's tokens, each [T, rotary_dim / 2]."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. The first `rotary_dim` numbers of a head are rotated, the others pass.

    `max_position` is the trained length for "dynamic", `original_max_position` the one for the other scalings.
    cos and sin are multiplied by `attention_factor`.

    `sections`: how many pairs of numbers are rotated by the position in time, by that of the row and by that of the
    column, where a token has three positions (arXiv 2409.12191). One section follows another, or, `mixes_sections`,
    rows and columns have every third pair, from the second and the third on, and time has the others.

    `turning`: the share of the pairs that turn at all, for "proportional".
    """

    theta: float
    rotary_dim: int
    rope_type: str = "default"
    factor: float = 1.0
    max_position: int = 0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    sections: tuple[int, ...] = field(default=(), metadata={"later": True})  # `models.config.LATER`
    mixes_sections: bool = field(default=False, metadata={"later": True})
    turning: float = field(default=1.0, metadata={"later": True})


@dataclass(frozen=True)
class QueryGrowth:
    """How queries of layers without rotation grow with their position p: by log(1 + floor((p + first) / floor)) * scale
    + 1 (arXiv 2501.19399). `of_rotated`: those of layers with a rotation do."""

    floor: float
    scale: float
    first: int = field(default=1, metadata={"later": True})  # `models.config.LATER`
    of_rotated: bool = field(default=False, metadata={"later": True})


def rope_cos_sin(
    rope: RopeConfig, positions_T: jax.Array, max_model_len: int, offsets_3T: jax.Array | None = None
) -> CosSin:
    """Float32 (cos, sin) of the angles at these positions, each [T, rotary_dim / 2].

    With `offsets_3T`, and sections, a pair is rotated by the position of its section, `positions_T` plus its offset.
    """
    positions = positions_T.astype(jnp.float32)[:, None]
    if offsets_3T is not None and rope.sections:
        time, row, column = ((positions_T + offset_T).astype(jnp.float32)[:, None] for offset_T in offsets_3T)
        sections = section_of_pairs(rope)
        positions = jnp.where(sections == 1, row, jnp.where(sections == 2, column, time))
    angles = positions * inverse_frequencies(rope, max_model_len)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def section_of_pairs(rope: RopeConfig) -> np.ndarray:
    """0 for pairs that time rotates, 1 for rows, 2 for columns: [rotary_dim / 2]."""
    if not rope.mixes_sections:
        return np.repeat(np.arange(3), rope.sections)
    sections = np.zeros(rope.rotary_dim // 2, np.int64)
    for section in (1, 2):
        sections[section : 3 * rope.sections[section] : 3] = section
    return sections


def query_growth(config: QueryGrowth, positions_T: jax.Array) -> jax.Array:
    """Float32 factors of queries at these positions."""
    return jnp.log1p(jnp.floor((positions_T.astype(jnp.float32) + config.first) / config.floor)) * config.scale + 1


def apply_rope(x_TNH: jax.Array, cos: jax.Array, sin: jax.Array, is_interleaved: bool = False) -> jax.Array:
    """Rotate the heads: number i of the rotated part pairs with number i + rotary_dim / 2. In float32.

    `is_interleaved`: numbers 2 i and 2 i + 1 make a pair.
    """
    rotary_dim = 2 * cos.shape[-1]
    rotate = partial(jax.lax.platform_dependent, cpu=in_one_piece(is_interleaved), default=in_halves(is_interleaved))
    rotated_TNR = rotate(x_TNH[..., :rotary_dim].astype(jnp.float32), cos[:, None, :], sin[:, None, :])
    return jnp.concatenate([rotated_TNR.astype(x_TNH.dtype), x_TNH[..., rotary_dim:]], axis=-1)


Rotation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [T, N, R], cos and sin [T, 1, R / 2]) -> x rotated, all in float32."""


def in_halves(is_interleaved: bool) -> Rotation:
    """The first numbers of all pairs, then the second ones."""

    def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        half = cos.shape[-1]
        x1, x2 = (x[..., ::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        return jnp.stack([y1, y2], axis=-1).reshape(x.shape) if is_interleaved else jnp.concatenate([y1, y2], axis=-1)

    return rotate


def in_one_piece(is_interleaved: bool) -> Rotation:
    """The same of pairs and of pairs turned around. XLA:CPU makes one kernel of it, and of halves, which it does not
    join in one, five more: with those a 110M Llama has 371 kernels in a program in place of 311, and takes 1.53 s of
    CPU time to compile in place of 1.17. XLA:TPU estimates up to 1.6 times the cycles for it."""

    def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        half, axis = cos.shape[-1], -1 if is_interleaved else -2
        pairs = x.reshape(*x.shape[:-1], *((half, 2) if is_interleaved else (2, half)))
        cos, sin = (jnp.expand_dims(angles, axis) for angles in (cos, sin))
        signs = jnp.expand_dims(jnp.array([-1.0, 1.0]), -3 - axis)  # of the first and the second of a pair
        return (pairs * cos + jnp.flip(pairs, axis) * (sin * signs)).reshape(x.shape)

    return rotate


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """Float32 angle per position, one for every pair of numbers: [rotary_dim / 2].

    "dynamic" and "longrope" depend on the length of the sequence. Keys stay in the cache, so one engine needs one
    answer: both go by `max_model_len`, the longest sequence that the engine accepts. Up to the trained length that
    is what transformers computes; beyond it transformers computes the same for a prompt of just `max_model_len`
    tokens (dynamic), or for every prompt longer than the trained length (longrope), where vLLM decides alike.
    """
    compute = FREQUENCIES[rope.rope_type]
    return compute(rope, max_model_len).astype(np.float32)


def plain(rope: RopeConfig, theta: float | None = None) -> np.ndarray:
    """theta ** (-2 i / rotary_dim)."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    return 1.0 / np.float64(theta or rope.theta) ** exponents


def default(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    return plain(rope)


def linear(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """Positions shrink by `factor`."""
    return plain(rope) / rope.factor


def dynamic(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """The base grows with the part of the sequence that exceeds the trained length."""
    length = max(max_model_len, rope.max_position)
    growth = rope.factor * length / rope.max_position - (rope.factor - 1)
    return plain(rope, rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def llama3(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones stay, and those between are blended."""
    frequencies = plain(rope)
    turns = rope.original_max_position * frequencies / (2 * math.pi)  # over the trained length
    between = rope.high_freq_factor - rope.low_freq_factor
    blend = np.clip((turns - rope.low_freq_factor) / between, 0.0, 1.0) if between else turns > rope.low_freq_factor
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def yarn(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """Interpolate the frequencies that turn less than `beta_slow` times over the trained length; keep fast ones."""

    def pair_that_turns(times: float) -> float:
        length = rope.original_max_position / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    ramp = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
    frequencies = plain(rope)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def longrope(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """Every frequency has its own divisor, from one list for short and another for long sequences."""
    is_long = max_model_len > rope.original_max_position
    return plain(rope) / np.asarray(rope.long_factor if is_long else rope.short_factor, np.float64)


def proportional(rope: RopeConfig, max_model_len: int) -> np.ndarray:
    """The slowest pairs stand still (Gemma 4's published definition)."""
    turns = np.arange(rope.rotary_dim // 2) < int(rope.turning * rope.rotary_dim // 2)
    return plain(rope) * turns / rope.factor


FREQUENCIES = {
    "default": default,
    "linear": linear,
    "dynamic": dynamic,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": proportional,
}
"""rope_type in config.json -> the function that computes its inverse frequencies."""
