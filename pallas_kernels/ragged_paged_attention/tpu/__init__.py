"""Ragged paged attention on TPUs, in Pallas for Mosaic. Three kernels: write the cache, decodes, and prompts.

Layout: keys and values side by side, `[blocks, kv heads, slots, lanes]` (`lanes.py`). The cache stays in HBM; its
blocks, and the pages of the block table that name them, are fetched by asynchronous copies while the blocks before
them are computed (`fetch.py`). The block table need not fit any other memory.

Grid: (groups of kv heads, blocks of requests) for rows with one new token (`decode.py`), (groups of kv heads, tiles of
neighbouring tokens) for the others (`prefill.py`). Within a grid block, steps go over the pieces of its requests'
contexts (`plan.py`): several at a time, of whatever requests, for decodes, one chunk for prompts. So a step costs the
same whoever it belongs to, and one long context among short ones costs what it holds. A program for decodes only has
neither the prompts' kernel nor what orders tokens for it. Spans that rows share come first (`spans.py`): the prompts'
kernel over tiles of the queries of all rows that hold them, whatever their number of new tokens, leaves a softmax for
each query, with which both kernels begin that read what is a row's own. In a step without spans a branch passes it by.

Skipping: blocks behind all that queries see or before their window are neither fetched nor looked up, pieces of context
without such blocks are not worked on, chunks that all queries of a tile see whole are not masked.

Requires: bfloat16 or float32 queries; a cache of these or of int8, float8_e4m3fn, float8_e5m2; blocks of multiples of
8 slots for float32 and of 16 for others; one tile of queries of one kv head with its chunk of context in VMEM
(`tiles.py`).

Padding: tokens beyond the last row's write nowhere; their output is zero. Head dims are padded to 64 or to multiples of
128 lanes. Query heads of a decode lie in tiles of 8 rows: those of one kv head are padded to whole tiles, unless those
of several fill one together (1, 2 and 4 query heads each). Each of these kv heads then multiplies the queries of all.

Numerics: scores, softmax state and accumulators are float32; probabilities enter the second product in the cache's
type; of a cache of 8 bits both products are in the queries' type, and scales multiply scores and probabilities in
float32. Slots that nobody may see are replaced by zeros, not multiplied by them, and may hold NaN.
What spans leave is float32; with it sums are taken in another order, so bits depend on what rows share.

Cost: a decode reads every block of its context once, and a prompt every block once per tile of queries; a span is read
once per tile of the queries that share it, 32 of them in steps of up to 256 tokens, else 128. Where others hold parts
of contexts, decodes are rows of such tiles too, and products have all rows of a tile for each request. A new token
rewrites the tile of slots around it. Products go over whole pieces of context: a short one is padded to 256 slots.
Scales of tokens take 1 KiB per block and head, up to 128 slots: use large blocks with them. The block table is copied
into pages once a step.

This module knows nothing of meshes and of who owns which block. Letters beside the package's: D lanes of an operand,
W lanes of a slot, E tiles of a decode's query rows and X rows of one, Y tokens padded to whole tiles, Z decode
segments.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.quantized import LARGEST, is_quantized, kind_of, quantize_new
from pallas_kernels.ragged_paged_attention.tpu import plan as work
from pallas_kernels.ragged_paged_attention.tpu import spans, tiles
from pallas_kernels.ragged_paged_attention.tpu.decode import DecodeShape, decode_attention
from pallas_kernels.ragged_paged_attention.tpu.fetch import FetchShape
from pallas_kernels.ragged_paged_attention.tpu.lanes import (
    NUM_LANES,
    LanesLayout,
    join,
    over_lanes,
    pad_lanes,
    round_up,
    sublane_tile,
)
from pallas_kernels.ragged_paged_attention.tpu.operands import Begun, Operands
from pallas_kernels.ragged_paged_attention.tpu.prefill import PrefillShape, prefill_attention, spans_attention
from pallas_kernels.ragged_paged_attention.tpu.segments import (
    CHUNK_SLOTS,
    DECODE_ITEM_SLOTS,
    Segments,
    item_slots_of,
)
from pallas_kernels.ragged_paged_attention.tpu.softmax import LOG2_E, LOWEST, ScoreRule
from pallas_kernels.ragged_paged_attention.tpu.write import write_scales, write_tokens

TYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
SMALLEST_BLOCK = 16
"""Slots of a block that 8-bit types may have too, though half a tile of theirs."""


@dataclasses.dataclass(frozen=True)
class TpuBackend:
    """The backend's functions. `interpret` runs the kernels in JAX's simulator of a TPU, anywhere and very slowly."""

    interpret: pltpu.InterpretParams | None = None

    LAYOUT = LanesLayout()
    make_plan = staticmethod(work.make_plan)
    shared_work = staticmethod(spans.shared_work)

    def cannot_take(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        q_dtype: Any,
        kv_dtype: Any,
        kv_scales: str,
    ) -> str | None:
        """The reason why the kernels cannot attend with such heads, blocks and types, or None."""
        accepted = {"q": TYPES, "the cache": (*TYPES, *LARGEST)}
        for name, dtype in (("q", q_dtype), ("the cache", kv_dtype)):
            if dtype not in accepted[name]:
                return f"{name} is {jnp.dtype(dtype)}; accepted are {', '.join(map(str, accepted[name]))}"
        tile = min(sublane_tile(kv_dtype), SMALLEST_BLOCK)
        if block_size % tile:
            return f"block_size = {block_size}; accepted are multiples of {tile} for a cache of {jnp.dtype(kv_dtype)}"
        problem = tiles.Problem(num_kv_heads, num_heads // num_kv_heads, head_dim, block_size, q_dtype, kv_dtype)
        if tiles.prefill_heads(problem, spans.LARGEST_QUERY_TILE) is None:
            needed = tiles.prefill_bytes(problem, 1, spans.LARGEST_QUERY_TILE)
            return (
                f"{num_heads} query heads over {num_kv_heads} of head_dim {head_dim} need {needed / 2**20:.0f} MiB of "
                f"VMEM; accepted is what needs at most {tiles.VMEM_GOAL_BYTES / 2**20:.0f}"
            )
        return None

    def attention(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        kv: tuple[jax.Array],
        metadata: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: jax.Array | None,
        scales: tuple[jax.Array, ...] = (),
        undivided: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array], tuple[jax.Array, ...]]:
        """See `ragged_paged_attention`; `kv` is (kv_BKSW,), `scales` are (k_K, v_K) or (scales_BK2L,)."""
        (T, N, H), K, plan = q_TNH.shape, kv[0].shape[1], metadata.plan
        settings = {"vmem_limit_bytes": tiles.VMEM_LIMIT_BYTES, "interpret": self.interpret or False}
        problem = tiles.Problem(K, N // K, H, kv[0].shape[2], q_TNH.dtype, kv[0].dtype)
        (kv_BKSW,) = kv
        if k_TKH is not None and v_TKH is not None:
            new_TKW, scales = self._new_slots(k_TKH, v_TKH, kv_BKSW.dtype, scales, plan.writes[problem.block_size])
            group = work.write_group_of(problem.block_size, kv_BKSW.dtype)
            kv_BKSW = write_tokens(new_TKW, kv_BKSW, plan.writes[group], group, **settings)
        sinks_KG = None if sinks_N is None else LOG2_E * sinks_N.astype(jnp.float32).reshape(K, N // K)
        rule, decodes_only = ScoreRule(scale, soft_cap), metadata.decodes_only
        layer = _Layer(problem, plan, rule, window, sinks_KG, kv_BKSW, scales, settings, decodes_only)
        # Without the barrier XLA computes queries once for each shape that they have below.
        q_TND = lax.optimization_barrier(pad_lanes(q_TNH, problem.lanes.operand))
        if undivided:
            return layer.attend_part(q_TND), (kv_BKSW,), scales
        begun = (None, None) if plan.spans is None else layer.attend_spans(q_TND)
        q_ZEXD, q_KGYD = layer.in_order(q_TND)
        decoded_ZND = layer.decode(q_ZEXD, begun[0])
        if layer.decodes_only:
            out_TND = _resized(decoded_ZND, T)
        else:
            decoded_TND = decoded_ZND.at[plan.decode_segment_T].get(mode="clip")
            is_decode_T = (plan.decode_segment_T >= 0)[:, None, None]
            out_TND = jnp.where(is_decode_T, decoded_TND, _by_line(layer.prefill(q_KGYD, begun[1]))[:T])
        return out_TND[..., problem.lanes.outputs], (kv_BKSW,), scales

    def _new_slots(
        self, k_TKH: jax.Array, v_TKH: jax.Array, dtype: Any, scales: tuple[jax.Array, ...], block_writes: work.Writes
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """(what goes into the cache, new_TKW in float32, scales after the step)."""
        if not is_quantized(dtype):
            return join(k_TKH.astype(jnp.float32), v_TKH.astype(jnp.float32)), scales
        of_keys_and_values = scales if len(scales) == 2 else scales * 2 or (None, None)
        (k_TKH, k_scale_TK), (v_TKH, v_scale_TK) = (
            quantize_new(x_TKH, scale, dtype) for x_TKH, scale in zip((k_TKH, v_TKH), of_keys_and_values)
        )
        if kind_of(scales) == "token":
            scales = (write_scales(jnp.stack([k_scale_TK, v_scale_TK], axis=-1), scales[0], block_writes),)
        return join(k_TKH.astype(jnp.float32), v_TKH.astype(jnp.float32)), scales


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Brings queries into the kernels' order, and outputs back into tokens'."""

    problem: tiles.Problem
    plan: Any  # a work.Plan or a work.PartPlan
    rule: ScoreRule
    window: int | None
    sinks_KG: jax.Array | None
    kv_BKSW: jax.Array
    scales: tuple[jax.Array, ...]
    settings: dict[str, Any]
    decodes_only: bool

    def in_order(self, x_TN: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Lines of tokens in the order of the rows that decode, x_ZEX, and in tiles of those with several new tokens,
        x_KGY; None where all decode."""
        tokens_Z = self.plan.decode_token_Z
        of_rows = _resized(x_TN, len(tokens_Z)) if self.decodes_only else x_TN.at[tokens_Z].get(mode="clip")
        G = self.problem.group_size * self.problem.heads_per_tile(self.decode_heads)
        x_ZEX = _pad_axis(of_rows.reshape(len(tokens_Z), -1, G, x_TN.shape[-1]), 2, self.problem.decode_rows)
        return x_ZEX, None if self.decodes_only else self._tiled(x_TN)  # where all decode, segment i is token i

    def _tiled(self, x_TN: jax.Array) -> jax.Array:
        """x_KGY: lines by head, and padded to whole tiles of tokens."""
        x_NY = _pad_axis(x_TN.swapaxes(0, 1), 1, round_up(len(x_TN), self.plan.query_tile))
        return x_NY.reshape(self.problem.num_kv_heads, self.problem.group_size, *x_NY.shape[1:])

    def attend_spans(self, q_TND: jax.Array) -> tuple[Begun, Begun | None]:
        """Attention to the spans that rows share, in both orders. In a step in which none do it costs nothing, and says
        nothing: nobody reads it then."""
        spans, D = self.plan.spans, q_TND.shape[-1]

        def attend() -> tuple[Begun, Begun | None]:
            q_KGYD = self._tiled(q_TND.at[spans.token_Y].get(mode="clip"))
            operands, shape = self._in_tiles(spans.segments, q_KGYD, spans.position_YL, spans.end_YL)
            begun_KGY = spans_attention(operands, shape, **self.settings)
            begun_TN = jax.tree.map(lambda x: _by_line(x).at[spans.place_T].get(mode="clip"), begun_KGY)
            shares_T = spans.shares_T[:, None, None]
            alone_NL = LOWEST if self.sinks_KG is None else self.sinks_KG.reshape(-1, 1)
            out = self.in_order(jnp.where(shares_T, begun_TN.out, 0))
            top = self.in_order(jnp.where(shares_T, begun_TN.top, alone_NL))
            return Begun(out[0], top[0]), None if self.decodes_only else Begun(out[1], top[1])

        orders = jax.eval_shape(self.in_order, q_TND)

        def skip() -> tuple[Begun, Begun | None]:
            empty = lambda x: Begun(*(lax.empty((*x.shape[:-1], lanes), jnp.float32) for lanes in (D, NUM_LANES)))
            return empty(orders[0]), None if self.decodes_only else empty(orders[1])

        return lax.cond(spans.segments.item_end_J[-1] > 0, attend, skip)

    def attend_part(self, q_TND: jax.Array) -> jax.Array:
        """What of each query's context is held here, [T, N, H + 2]: as if it were one slot, whose value is what all
        add up to and whose score is their weight."""
        operands, shape = self._in_tiles(self.plan.segments, self._tiled(q_TND), self.plan.position_YL)
        part_KGY = spans_attention(operands, shape, **self.settings)
        part_TN = jax.tree.map(lambda x: _by_line(x)[: len(q_TND)], part_KGY)
        top_TN1 = part_TN.top[..., :1]
        outs = part_TN.out[..., self.problem.lanes.outputs], jnp.ones_like(top_TN1), top_TN1 / LOG2_E
        return jnp.concatenate(outs, axis=-1)

    @property
    def decode_heads(self) -> int:
        """kv heads that the decode kernel holds at once."""
        heads = tiles.decode_heads(self.problem, work.rows_per_block(len(self.plan.decode_token_Z)))
        assert heads is not None, self.problem
        return heads

    def decode(self, q_ZEXD: jax.Array, begun_ZEX: Begun | None) -> jax.Array:
        """out_ZND of the rows that decode, zeros behind them."""
        problem, heads, (Z, _, X, D) = self.problem, self.decode_heads, q_ZEXD.shape
        fetch = self._fetch(tiles.decode_items(problem, heads), heads, DECODE_ITEM_SLOTS)
        together = problem.heads_per_tile(heads)
        operands = self._operands(self.plan.decode, q_ZEXD, X, together, begun=begun_ZEX)
        shape = DecodeShape(fetch, problem.lanes, self.rule, work.rows_per_block(Z), together)
        out_ZEXD = decode_attention(operands, shape, **self.settings)
        return out_ZEXD[:, :, : together * problem.group_size].reshape(Z, -1, D)

    def prefill(self, q_KGYD: jax.Array, begun_KGY: Begun | None) -> jax.Array:
        """out_KGYD of the rows with several new tokens, zeros for the others."""
        operands, shape = self._in_tiles(self.plan.prefill, q_KGYD, end_YL=self.plan.end_YL, begun=begun_KGY)
        return prefill_attention(operands, shape, **self.settings)

    def _in_tiles(self, segments: Segments, q_KGYD: jax.Array, *more: Any, **named: Any) -> tuple[Any, PrefillShape]:
        """What the prefill kernel takes."""
        problem, tile = self.problem, self.plan.query_tile
        fetch = self._fetch(1, tiles.prefill_heads(problem, tile), CHUNK_SLOTS)
        groups = tiles.tile_groups(problem.group_size, tile)
        operands = self._operands(segments, q_KGYD, problem.group_size, 1, *more, **named)
        part_rows = tiles.part_rows(groups * tile)
        return operands, PrefillShape(fetch, problem.lanes, self.rule, self.window, tile, groups, part_rows)

    def _operands(
        self,
        segments: Segments,
        q: jax.Array,
        sink_rows: int,
        heads_per_tile: int,
        position_YL: jax.Array | None = None,
        end_YL: jax.Array | None = None,
        begun: Begun | None = None,
    ) -> Operands:
        kind, sinks_KX = kind_of(self.scales), None
        if self.sinks_KG is not None:
            sinks_EX = _pad_axis(self.sinks_KG.reshape(-1, heads_per_tile * self.problem.group_size), 1, sink_rows)
            sinks_KX = jnp.repeat(sinks_EX, heads_per_tile, axis=0)
        return Operands(
            segments=segments,
            q=q,
            sinks=None if sinks_KX is None else over_lanes(sinks_KX),
            position_YL=position_YL,
            end_YL=end_YL,
            begun=begun,
            head_scales_K2L=over_lanes(jnp.stack(self.scales, axis=1)) if kind == "head" else None,
            tables=self.plan.tables,
            kv_BKSW=self.kv_BKSW,
            token_scales_BK2L=self.scales[0] if kind == "token" else None,
        )

    def _fetch(self, items: int, heads: int, at_least: int) -> FetchShape:
        return FetchShape(
            num_items=items,
            num_heads=heads,
            item_slots=item_slots_of(self.problem.block_size, at_least),
            block_size=self.problem.block_size,
            slot_lanes=self.problem.lanes.slot,
            pages_per_row=self.plan.pages_per_row,
            token_scales=kind_of(self.scales) == "token",
        )


def _by_line(x_KGY: jax.Array) -> jax.Array:
    """x_YN."""
    return x_KGY.reshape(-1, *x_KGY.shape[2:]).swapaxes(0, 1)


def _resized(x: jax.Array, size: int) -> jax.Array:
    """The first lines, and zeros behind them where there are fewer than `size`."""
    return _pad_axis(x[:size], 0, size)


def _pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
