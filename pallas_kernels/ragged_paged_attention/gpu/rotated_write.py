"""What comes before attention in one launch: queries and keys are normalised and rotated, keys and values are written.

Layout: queries, keys and values [T, heads, H] as products leave them, apart; or as one array [T, K, G + 2, H], each key
head's queries, itself and its values one behind the other.

Grid: tiles of `TOKENS` tokens, and all heads. A program has one head.

Requires: a cache in the type of the keys.

Padding: tokens beyond the last row's write nowhere; their queries become zero.

Numerics: as XLA's rotation: float32, rounded once; a norm is rounded before its weight and behind it.

Cost: one launch. It reads and writes each number once, where three launches read and write keys twice.

This module knows nothing of attention.

Letters beside the package's: P pairs of numbers that are rotated together, J heads of a key head's group, X tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.gpu.statics import pieces
from pallas_kernels.ragged_paged_attention.rotation import Rotation
from pallas_kernels.shapes import ceil_div

TOKENS = 16


@dataclasses.dataclass(frozen=True)
class _Head:
    """What is static of a head. eps: of the norm, None without one."""

    head_dim: int
    num_pairs: int
    is_interleaved: bool
    eps: float | None

    def columns(self) -> list[tuple[jax.Array, jax.Array, bool]]:
        """(columns [1, P], whether they are within, whether they are of a pair) of vectors that make up a head: those
        of the first numbers of pairs, of the second ones, and so on, then those that are not rotated."""
        result = []
        for offset, size in pieces(self.num_pairs):
            pair_1P = offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
            first, second = pair_1P, pair_1P + self.num_pairs
            if self.is_interleaved:
                first, second = 2 * pair_1P, 2 * pair_1P + 1
            result += [(first, pair_1P < self.num_pairs, True), (second, pair_1P < self.num_pairs, True)]
        for offset, size in pieces(self.head_dim - 2 * self.num_pairs):
            column_1P = 2 * self.num_pairs + offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
            result.append((column_1P, column_1P < self.head_dim, False))
        return result


def rotate_and_write(
    heads: tuple[jax.Array, ...], rotation: Rotation, caches: tuple[jax.Array, ...], plan: Any, interpret: bool
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """(rotated q_TNH, the caches [B, K, S, H] with what is new), in place when they are donated. `heads`: queries, keys
    and values, or all in one array, see above."""
    T, K, H = len(heads[0]), caches[0].shape[1], heads[0].shape[-1]
    N = heads[0].shape[1] if len(heads) == 3 else K * (heads[0].shape[2] - 2)
    norm = rotation.norm
    weights = () if norm is None else (norm.q_weight_H, norm.k_weight_H)
    head = _Head(H, rotation.cos_TP.shape[1], rotation.is_interleaved, None if norm is None else norm.eps)
    inputs = (plan.slot_block_T, plan.slot_offset_T, rotation.cos_TP, rotation.sin_TP, *weights, *heads)
    q_TNH, *caches = pl.pallas_call(
        functools.partial(_kernel, head, len(weights), len(heads)),
        grid=(ceil_div(T, TOKENS), N + 2 * K),
        out_shape=(jax.ShapeDtypeStruct((T, N, H), heads[0].dtype), *(_struct(x) for x in caches)),
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_rotate_and_write",
    )(*inputs, *caches)
    return q_TNH, tuple(caches)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _kernel(head: _Head, num_weights: int, num_arrays: int, block_T, offset_T, cos_TP, sin_TP, *refs):
    weights, new = refs[:num_weights], refs[num_weights : num_weights + num_arrays]
    q_TNH, k_BKSH, v_BKSH = refs[-3:]
    tile, place = pl.program_id(0), pl.program_id(1)
    (T, N, _), (B, K, *_) = q_TNH.shape, k_BKSH.shape
    G = N // K
    key, member = lax.div(place, G + 2), lax.rem(place, G + 2)
    token_X1 = tile * TOKENS + lax.broadcasted_iota(jnp.int32, (TOKENS, 1), 0)
    exists_X1 = token_X1 < T
    block_X1 = plgpu.load(block_T.at[token_X1], mask=exists_X1, other=B)
    offset_X1 = plgpu.load(offset_T.at[token_X1], mask=exists_X1, other=0)
    is_here_X1 = (block_X1 >= 0) & (block_X1 < B)
    turn = functools.partial(_rotated, head, cos_TP, sin_TP, token_X1, is_here_X1)
    # Where a head lies: in an array of its own kind, or in the only one.
    at = lambda kind, number: (new[kind], (token_X1, number)) if num_arrays == 3 else (new[0], (token_X1, key, member))

    @pl.when(member < G)
    def _():
        number = key * G + member
        values = turn(*_loaded(head, *at(0, number), is_here_X1), weights[:1])
        _store(head, q_TNH, (token_X1, number), values, exists_X1)

    @pl.when(member == G)
    def _():
        values = turn(*_loaded(head, *at(1, key), is_here_X1), weights[1:])
        _store(head, k_BKSH, (block_X1, key, offset_X1), values, is_here_X1)

    @pl.when(member == G + 1)
    def _():
        values, _ = _loaded(head, *at(2, key), is_here_X1)
        _store(head, v_BKSH, (block_X1, key, offset_X1), values, is_here_X1)


def _loaded(head: _Head, ref: Any, index: tuple, wanted_X1: jax.Array) -> tuple[list[jax.Array], Any]:
    """(the vectors [X, P] of a head as `columns` has them, zero where not wanted; their type)."""
    return [
        plgpu.load(ref.at[(*index, column_1P)], mask=wanted_X1 & within_1P, other=jnp.zeros((), ref.dtype))
        for column_1P, within_1P, _ in head.columns()
    ], ref.dtype


def _store(head: _Head, ref: Any, index: tuple, values: list[jax.Array], wanted_X1: jax.Array) -> None:
    for (column_1P, within_1P, _), x_XP in zip(head.columns(), values):
        plgpu.store(ref.at[(*index, column_1P)], x_XP.astype(ref.dtype), mask=wanted_X1 & within_1P)


def _rotated(
    head: _Head, cos_TP, sin_TP, token_X1: jax.Array, wanted_X1: jax.Array, values: list[jax.Array], dtype, weights
) -> list[jax.Array]:
    """A head normalised, if there is a weight for it, and rotated."""
    if weights:
        square = sum(jnp.sum(x.astype(jnp.float32) * x.astype(jnp.float32), axis=1, keepdims=True) for x in values)
        factor_X1 = lax.rsqrt(square / head.head_dim + head.eps)
        scales = [
            plgpu.load(weights[0].at[column_1P], mask=within_1P, other=jnp.zeros((), weights[0].dtype))
            for column_1P, within_1P, _ in head.columns()
        ]
        values = [(x * factor_X1).astype(dtype) * scale for x, scale in zip(values, scales)]
    result = []
    for i, (offset, size) in enumerate(pieces(head.num_pairs)):
        pair_1P = offset + lax.broadcasted_iota(jnp.int32, (1, size), 1)
        mask = wanted_X1 & (pair_1P < head.num_pairs)
        cos, sin = (plgpu.load(ref.at[token_X1, pair_1P], mask=mask, other=0.0) for ref in (cos_TP, sin_TP))
        first, second = (x.astype(jnp.float32) for x in values[2 * i : 2 * i + 2])
        result += [first * cos - second * sin, second * cos + first * sin]
    return result + values[len(result) :]
