"""Ragged paged attention on NVIDIA GPUs from Ampere on: Pallas kernels for Triton.

Layout: keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous.

Grid: (items, kv heads). An item is a tile of neighbouring query tokens of one row, all query heads of the kv head
with them as rows of one product, and a part of their context. There are two calls, one for rows with so few new
tokens that a small tile holds them (decodes), one for all other rows; each takes everything that varies from step to
step as data. Where a step has too few tiles to fill the device, contexts are cut into as many parts as it takes, of
equal length whoever they belong to, and a further call merges the partial results.

Skipping: context behind the last query of a tile and before its window is not read, at the grain of one iteration.
Programs beyond the last item read one number and stop.

Requires: compute capability 8.0 or more; head_dim up to 256; float32, bfloat16 or float16 keys and values.

Padding: tokens beyond the last row's write nowhere; their output is zero. Rows of a tile without a query are masked.

Numerics: scores, softmax state, accumulators and partial results are float32; probabilities enter the second product
in the cache's type. Slots that no query of the tile sees are not read, so they may hold NaN.

Cost: a decode reads each key and value once, and writes 4 * head_dim bytes for each query head and part. A call that
has nothing to do costs some microseconds, so steps of few tokens have one class of tiles only.

This module knows nothing of meshes, of who owns which block, and of how a kernel is launched (calls.py).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.gpu.items import make_items
from pallas_kernels.ragged_paged_attention.gpu.tiles import Tiles, choose_tiles, device_kind
from pallas_kernels.ragged_paged_attention.layout import SplitLayout

NOWHERE = 2**31 - 1  # a block that no pool has
MAX_HEAD_DIM = 256
ALL_DECODE_TOKENS = 32  # steps up to here are not worth a second class of tiles
MAX_GROUP_SIZE = 128
TYPES = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each token's keys and values go; `NOWHERE` for padding tokens.

    The lists of items depend on the number of heads, which is not known here. Layers make them, and XLA merges what
    equal layers compute from equal inputs.
    """

    slot_block_T: jax.Array
    slot_offset_T: jax.Array


@dataclasses.dataclass(frozen=True)
class WorkClass:
    """The rows that one kind of tile serves, and the most tiles that they can make."""

    tiles: Tiles
    wanted_R: jax.Array
    num_tiles: int


@dataclasses.dataclass(frozen=True)
class GpuBackend:
    """The backend's functions. `interpret` runs the kernels in Pallas's interpreter, anywhere and very slowly."""

    interpret: bool

    LAYOUT = SplitLayout()

    def why_not(self, platform: str) -> str | None:
        if self.interpret or platform == "gpu":
            return None
        return "it needs an NVIDIA GPU; 'gpu-interpret' runs the same kernels in Pallas's interpreter, for tests"

    def cannot_take(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, kv_dtype: Any
    ) -> str | None:
        """The reason why the kernels cannot attend with such heads, blocks and types, or None."""
        for name, dtype in (("q", q_dtype), ("the cache", kv_dtype)):
            if dtype.name not in TYPES:
                return f"{name} is {dtype}; accepted are {', '.join(TYPES)}"
        if head_dim > MAX_HEAD_DIM:
            return f"head_dim = {head_dim}; accepted are at most {MAX_HEAD_DIM}"
        if num_heads // num_kv_heads > MAX_GROUP_SIZE:
            return f"{num_heads // num_kv_heads} query heads per kv head; accepted are at most {MAX_GROUP_SIZE}"
        return None

    def make_plan(
        self,
        query_start_loc_R1: jax.Array,
        seq_lens_R: jax.Array,
        block_tables_RM: jax.Array,
        *,
        num_tokens: int,
        block_size: int,
        window: int | None,
    ) -> Plan:
        """The plan of one step; see `make_metadata` for the arguments."""
        end_R = query_start_loc_R1[1:]
        token_T = jnp.arange(num_tokens, dtype=jnp.int32)
        row_T = jnp.minimum(jnp.sum(end_R <= token_T[:, None], axis=-1), len(seq_lens_R) - 1)
        position_T = (seq_lens_R - end_R)[row_T] + token_T
        block_T = block_tables_RM.at[row_T, position_T // block_size].get(mode="clip")
        return Plan(jnp.where(token_T < end_R[-1], block_T, NOWHERE), position_T % block_size)

    def attention(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        kv: tuple[jax.Array, ...],
        metadata: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `ragged_paged_attention`; `kv` is (k_BKSH, v_BKSH)."""
        from pallas_kernels.ragged_paged_attention.gpu import calls  # Pallas takes 0.3 s to import

        (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
        kv = calls.write(k_TKH, v_TKH, kv, metadata.plan, self.interpret)
        rule = calls.LayerRule(scale, window, soft_cap, sinks_N is not None)
        sinks_N = jnp.zeros(N, jnp.float32) if sinks_N is None else sinks_N.astype(jnp.float32)
        kind = device_kind(self.interpret)
        out_TNH = jnp.zeros_like(q_TNH)
        for work in work_classes(metadata, T, N // K, H, kv[0].dtype, kind):
            sizes = work.tiles.sizes(N // K, K, kind)
            items = make_items(metadata, work.wanted_R, work.num_tiles, sizes, window)
            out_TNH = calls.attend(
                rule, work.tiles, sizes, items, metadata, sinks_N, q_TNH, kv, out_TNH, interpret=self.interpret
            )
        return out_TNH, kv


def work_classes(
    metadata: Any, num_tokens: int, group_size: int, head_dim: int, dtype: Any, kind: str
) -> list[WorkClass]:
    """Decodes and everything else, or all rows as decodes when the step is small."""
    start_R1 = metadata.query_start_loc_R1
    num_queries_R = start_R1[1:] - start_R1[:-1]
    R, T = len(num_queries_R), num_tokens
    few = choose_tiles("decode", group_size, head_dim, dtype, kind)
    most = few.queries(group_size)
    if T <= ALL_DECODE_TOKENS:
        return [WorkClass(few, num_queries_R > 0, min(T, T // most + R))]
    many = choose_tiles("prefill", group_size, head_dim, dtype, kind)
    num_others = min(R, T // (most + 1))  # a row that is no decode has more than `most` tokens
    num_tiles = min(T, T // many.queries(group_size) + num_others)
    return [
        WorkClass(few, num_queries_R <= most, min(T, R)),
        WorkClass(many, num_queries_R > most, num_tiles),
    ]

