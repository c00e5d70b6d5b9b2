"""Ragged paged attention on TPUs, in Pallas for Mosaic. Three kernels: write the cache, decodes, and prompts.

Layout: keys and values side by side, `[blocks, kv heads, slots, lanes]` (`lanes.py`). The cache stays in HBM; its
blocks, and the pages of the block table that name them, are fetched by asynchronous copies while the blocks before
them are computed (`fetch.py`). The block table need not fit any other memory.

Grid: (groups of kv heads, blocks of requests) for rows with one new token (`decode.py`), (groups of kv heads, tiles of
neighbouring tokens) for the others (`prefill.py`). Within a grid block, steps go over the pieces of its requests'
contexts (`plan.py`): several at a time, of whatever requests, for decodes, one chunk for prompts. So a step costs the
same whoever it belongs to, and one long context among short ones costs what it holds.

Skipping: blocks behind the last query or before its window are neither fetched nor looked up, pieces of context
without such blocks are not worked on, chunks that all queries of a tile see whole are not masked.

Requires: bfloat16 or float32 queries and cache; blocks of whole tiles of slots, 8 for float32 and 16 for bfloat16;
one tile of queries of one kv head with its chunk of context in VMEM (`tiles.py`).

Padding: tokens beyond the last row's write nowhere; their output is zero. Head dims are padded to 64 or to multiples of
128 lanes, query heads per kv head of a decode to 8.

Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's
type. Slots that nobody may see are replaced by zeros, not multiplied by them, and may hold NaN.

Cost: a decode reads every block of its context once, and a prompt every block once per tile of queries. A new token
rewrites the tile of slots around it. Products go over whole pieces of context: a short one is padded to 256 slots.

This module knows nothing of meshes and of who owns which block. Letters beside the package's: D lanes of an operand,
W lanes of a slot, X query rows of one kv head, Y tokens padded to whole tiles, Z decode segments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu import plan as work
from pallas_kernels.ragged_paged_attention.tpu import tiles
from pallas_kernels.ragged_paged_attention.tpu.decode import DecodeShape, decode_attention
from pallas_kernels.ragged_paged_attention.tpu.fetch import FetchShape
from pallas_kernels.ragged_paged_attention.tpu.lanes import (
    NUM_LANES,
    LanesLayout,
    join,
    pad_lanes,
    round_up,
    sublane_tile,
)
from pallas_kernels.ragged_paged_attention.tpu.prefill import PrefillShape, prefill_attention
from pallas_kernels.ragged_paged_attention.tpu.softmax import LOG2_E, ScoreRule
from pallas_kernels.ragged_paged_attention.tpu.write import write_tokens

TYPES = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class TpuBackend:
    """The backend's functions. `interpret` runs the kernels in JAX's simulator of a TPU, anywhere and very slowly."""

    interpret: pltpu.InterpretParams | None = None

    LAYOUT = LanesLayout()
    make_plan = staticmethod(work.make_plan)

    def why_not(self, platform: str) -> str | None:
        if self.interpret or platform == "tpu":
            return None
        return "it needs a TPU; 'tpu-interpret' runs the same kernels in JAX's simulator of one, for tests"

    def cannot_take(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, kv_dtype: Any
    ) -> str | None:
        """The reason why the kernels cannot attend with such heads, blocks and types, or None."""
        for name, dtype in (("q", q_dtype), ("the cache", kv_dtype)):
            if dtype not in TYPES:
                return f"{name} is {jnp.dtype(dtype)}; accepted are {', '.join(str(jnp.dtype(x)) for x in TYPES)}"
        if block_size % sublane_tile(kv_dtype):
            tile = sublane_tile(kv_dtype)
            return f"block_size = {block_size}; accepted are multiples of {tile} for a cache of {jnp.dtype(kv_dtype)}"
        problem = tiles.Problem(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, q_dtype, kv_dtype)
        if tiles.prefill_heads(problem, work.LARGEST_QUERY_TILE) is None:
            needed = tiles.prefill_bytes(problem, 1, work.LARGEST_QUERY_TILE)
            return (
                f"{num_heads} query heads over {num_kv_heads} of head_dim {head_dim} need {needed / 2**20:.0f} MiB of "
                f"VMEM; accepted is what needs at most {tiles.VMEM_GOAL_BYTES / 2**20:.0f}"
            )
        return None

    def attention(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        kv: tuple[jax.Array],
        metadata: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array]]:
        """See `ragged_paged_attention`; `kv` is (kv_BKSW,)."""
        (T, N, H), K, plan = q_TNH.shape, k_TKH.shape[1], metadata.plan
        settings = {"vmem_limit_bytes": tiles.VMEM_LIMIT_BYTES, "interpret": self.interpret or False}
        problem = tiles.Problem(K, N // K, H, kv[0].shape[2], q_TNH.dtype, kv[0].dtype)
        new_TKW = join(k_TKH.astype(jnp.float32), v_TKH.astype(jnp.float32))
        kv_BKSW = write_tokens(new_TKW, kv[0], plan.writes, work.write_group_of(problem.block_size), **settings)
        layer = _Layer(problem, plan, ScoreRule(scale, soft_cap), window, settings)
        sinks_KG = None if sinks_N is None else LOG2_E * sinks_N.astype(jnp.float32).reshape(K, N // K)
        q_TKGD = pad_lanes(q_TNH, problem.lanes.operand).reshape(T, K, N // K, problem.lanes.operand)
        decoded_ZKGD = layer.decode(q_TKGD, sinks_KG, kv_BKSW)
        prefilled_TKGD = layer.prefill(q_TKGD, sinks_KG, kv_BKSW)
        decoded_TKGD = decoded_ZKGD.at[plan.decode_segment_T].get(mode="clip")
        out_TKGD = jnp.where(plan.decode_segment_T[:, None, None, None] >= 0, decoded_TKGD, prefilled_TKGD)
        return out_TKGD[..., problem.lanes.outputs].reshape(T, N, H), (kv_BKSW,)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Brings queries into the kernels' order, and outputs back into tokens'."""

    problem: tiles.Problem
    plan: work.Plan
    rule: ScoreRule
    window: int | None
    settings: dict[str, Any]

    def decode(self, q_TKGD: jax.Array, sinks_KG: jax.Array | None, kv_BKSW: jax.Array) -> jax.Array:
        """out_ZKGD of the rows that decode."""
        problem, plan = self.problem, self.plan
        Z = len(plan.decode_token_Z)
        rows = work.rows_per_block(Z)
        heads = tiles.decode_heads(problem, rows)
        fetch = self._fetch(tiles.decode_items(problem, heads), heads, work.DECODE_ITEM_SLOTS)
        q_ZKGD = q_TKGD.at[plan.decode_token_Z].get(mode="clip")
        out_ZKXD = decode_attention(
            _pad_axis(q_ZKGD, 2, problem.decode_rows), _over_lanes(sinks_KG, problem.decode_rows), kv_BKSW,
            plan.tables, plan.decode, DecodeShape(fetch, problem.lanes, self.rule, rows), **self.settings,
        )  # fmt: skip
        return out_ZKXD[:, :, : problem.group_size]

    def prefill(self, q_TKGD: jax.Array, sinks_KG: jax.Array | None, kv_BKSW: jax.Array) -> jax.Array:
        """out_TKGD of the rows with several new tokens, zeros for the others."""
        problem, plan, T = self.problem, self.plan, len(q_TKGD)
        heads = tiles.prefill_heads(problem, plan.query_tile)
        groups = tiles.tile_groups(problem.group_size, plan.query_tile)
        shape = PrefillShape(
            self._fetch(1, heads, work.CHUNK_SLOTS), problem.lanes, self.rule, plan.query_tile, groups
        )
        q_KGYD = _pad_axis(q_TKGD.transpose(1, 2, 0, 3), 2, round_up(T, plan.query_tile))
        out_KGYD = prefill_attention(
            q_KGYD, _over_lanes(sinks_KG, problem.group_size), kv_BKSW, plan.tables, plan.prefill, shape,
            **self.settings,
        )  # fmt: skip
        return out_KGYD[:, :, :T].transpose(2, 0, 1, 3)

    def _fetch(self, items: int, heads: int, at_least: int) -> FetchShape:
        block_size = self.problem.block_size
        slots = work.item_slots_of(block_size, at_least)
        return FetchShape(
            items, heads, slots, block_size, self.problem.lanes.slot, self.window, self.plan.pages_per_row
        )


def _over_lanes(sinks_KG: jax.Array | None, rows: int) -> jax.Array | None:
    """[K, rows, lanes], all lanes alike."""
    if sinks_KG is None:
        return None
    sinks_KX = _pad_axis(sinks_KG, 1, rows)
    return jnp.broadcast_to(sinks_KX[..., None], (*sinks_KX.shape, NUM_LANES))


def _pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
