"""The softmax of the query rows of a tile, to which pieces of context are added one by one. Knows no work list.

Letters: X query rows of one kv head, P slots, D lanes of an operand, L lanes of a register.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.ragged_paged_attention.tpu.operands import Begun
from pallas_kernels.ragged_paged_attention.tpu.softmax import LOG2_E, LOWEST, weighted_values

Softmax = tuple[Any, Any, Any]
"""Tops [..., X, L], all lanes alike; totals [..., X, L], to be summed over lanes; weighted values [..., X, D]."""


@dataclasses.dataclass(frozen=True)
class TileState:
    """The softmax of every query of a tile, over what was seen so far."""

    acc_ref: Any  # [heads, X, D]
    top_total_ref: Any  # [2, heads, X, lanes]: tops, all lanes alike, and totals, to be summed over lanes
    exponent_ref: Any  # [most rows of a product, P]
    most_ref: Any  # [rows of a product, lanes]: the greatest of each row, all lanes alike

    def reset(self, sinks_ref: Any, queries: int) -> None:
        """A sink is a weight with no value."""
        _, heads, X, L = self.top_total_ref.shape
        self.acc_ref[...] = jnp.zeros_like(self.acc_ref)
        if sinks_ref is None:
            self.top_total_ref[0] = jnp.full((heads, X, L), LOWEST, jnp.float32)
            self.top_total_ref[1] = jnp.zeros((heads, X, L), jnp.float32)
            return
        for g in range(X // queries):
            sink_K1L = sinks_ref[:, g : g + 1, :]
            self.top_total_ref[0, :, g * queries : (g + 1) * queries] = jnp.broadcast_to(sink_K1L, (heads, queries, L))
        self.top_total_ref[1] = jnp.full((heads, X, L), 1 / L, jnp.float32)

    def begin(self, begun: Begun) -> None:
        """Go on from what shared spans have left; sinks are in there."""

        @pl.loop(0, len(self.acc_ref))
        def _(h):
            self.acc_ref[h] = begun.out[h].reshape(self.acc_ref.shape[1:])
            self.top_total_ref[0, h] = begun.top[h].reshape(self.top_total_ref.shape[2:])

        self.top_total_ref[1] = jnp.full(self.top_total_ref.shape[1:], 1 / NUM_LANES, jnp.float32)

    def put(self, exponent_XP: jax.Array) -> None:
        """Keep the exponents of a chunk for rows that are added next, part by part; what a query may not see is so low
        that it vanishes. They wait in VMEM while the products of further rows are made, and maxima with them."""
        rows = len(exponent_XP)
        self.exponent_ref[:rows] = exponent_XP
        most_X1 = exponent_XP.max(axis=-1, keepdims=True)
        self.most_ref[:rows] = jnp.broadcast_to(most_X1, (rows, self.most_ref.shape[1]))

    def add(self, h: Any, rows: Any, kept: Any, v_PD: jax.Array, v_scale: jax.Array | None) -> None:
        """Add a chunk for some rows of head `h`, of which `kept` says where their exponents were put."""
        exponent_XP = self.exponent_ref[kept]
        old_top_XL = self.top_total_ref[0, h, rows]
        top_XL = jnp.maximum(old_top_XL, self.most_ref[kept])
        keep_XL = jnp.exp2(old_top_XL - top_XL)
        weight_XP = jnp.exp2(exponent_XP - repeated(top_XL, exponent_XP))
        self.top_total_ref[0, h, rows] = top_XL
        self.top_total_ref[1, h, rows] = self.top_total_ref[1, h, rows] * keep_XL + sums_by_lane(weight_XP)
        acc_XD = self.acc_ref[h, rows]
        out_XD = weighted_values(weight_XP[None], v_PD[None], v_scale)[0]
        self.acc_ref[h, rows] = acc_XD * repeated(keep_XL, acc_XD) + out_XD

    def load(self, rows: Any) -> Softmax:
        """Of some rows of the first head."""
        return self.top_total_ref[0, 0, rows], self.top_total_ref[1, 0, rows], self.acc_ref[0, rows]

    def store(self, rows: Any, softmax: Softmax) -> None:
        self.top_total_ref[0, 0, rows], self.top_total_ref[1, 0, rows], self.acc_ref[0, rows] = softmax

    def result(self) -> Iterator[jax.Array]:
        """What `Begun` has; zeros, and a power that is nothing, for queries that saw nothing."""
        total = self.top_total_ref[1].sum(axis=-1, keepdims=True)
        yield self.acc_ref[...] / jnp.where(total == 0, 1, total)
        yield self.top_total_ref[0] + jnp.where(total == 0, 0, jnp.log(jnp.where(total == 0, 1, total)) * LOG2_E)


def merged(one: Softmax, other: Softmax) -> Softmax:
    """Two softmaxes of the same queries as one."""
    top = jnp.maximum(one[0], other[0])
    keep, add = jnp.exp2(one[0] - top), jnp.exp2(other[0] - top)
    out = one[2] * repeated(keep, other[2]) + other[2] * repeated(add, other[2])
    return top, one[1] * keep + other[1] * add, out


def repeated(x_XL: jax.Array, like: jax.Array) -> jax.Array:
    """All lanes of a row are alike: as many of them as `like` has."""
    return jnp.concatenate([x_XL] * (like.shape[-1] // NUM_LANES), axis=-1)


def sums_by_lane(x_XP: jax.Array) -> jax.Array:
    """[..., X, L]: sums of every 128th number of a row."""
    return sum(x_XP[..., i : i + NUM_LANES] for i in range(0, x_XP.shape[-1], NUM_LANES))
