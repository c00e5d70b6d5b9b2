"""Ragged paged attention on NVIDIA GPUs from Ampere on: kernels for Triton, in Pallas or in Triton itself.

Layout: keys and values apart, `[blocks, kv heads, slots, head dim]`: a block of one head is contiguous.

Grid: (items, kv heads). An item is a tile of neighbouring query tokens of one row, all query heads of the kv head
with them as rows of one product, and a part of their context. There are two calls, one for rows with so few new
tokens that a small tile holds them (decodes), one for all other rows; each takes everything that varies from step to
step as data. Where a step has too few tiles to fill the device, contexts are cut into as many parts as it takes, of
equal length whoever they belong to, and a further call merges the partial results. Spans that rows share come first, in
two calls: tiles of the queries of all rows that hold them (`shared_tiles.py`), in parts, and a merger that leaves of
each query what the others end with. Where others hold parts of contexts, each row's own is such a span.

Skipping: context behind what the queries of a tile see and before their window is not read, at the grain of one
iteration. Programs beyond the last item read one number and stop.

Requires: compute capability 8.0 or more; head_dim up to 512, or 256 in float32; a positive scale; keys and values in
float32, bfloat16, float16, or 8 bits with any kind of scales. A jax with a Pallas lowering for Triton, which is
deprecated, or jax-triton and triton.

Padding: tokens beyond the last row's write nowhere; their output is zero. Rows of a tile without a query are masked.

Numerics: scores, softmax state, accumulators and partial results are float32; probabilities enter the second product
in the cache's type. Numbers of 8 bits enter products in the queries' type; scales of keys multiply scores, those of
values probabilities. Slots that no query of the tile sees are not read, so they may hold NaN.

Cost: a decode reads each key and value once, and writes 4 * head_dim bytes for each query head and part; a span is read
once per tile of the queries that share it, 128 rows of all query heads of a kv head. Bits depend on that. A call that
has nothing to do costs some microseconds, so steps of few tokens have one class of tiles only, and what shares nothing
has programs without spans. A conditional around spans costs more than their launches: in CUDA's graphs its nodes made
a step of one request 1.3 times as long on an H200.

This module knows nothing of meshes, of who owns which block, and of how a kernel is launched (calls.py through Pallas,
triton_calls.py through jax-triton).
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.context_share import ContextShare, places_here
from pallas_kernels.ragged_paged_attention import sharing
from pallas_kernels.ragged_paged_attention.gpu.items import make_items, make_span_items
from pallas_kernels.ragged_paged_attention.gpu.mosaic import MosaicTiles, choose_mosaic_tiles
from pallas_kernels.ragged_paged_attention.gpu.mosaic import cannot_take as mosaic_cannot_take
from pallas_kernels.ragged_paged_attention.gpu.statics import LOG2_E, LOWEST, LayerRule
from pallas_kernels.ragged_paged_attention.gpu.tiles import Tiles, choose_tiles, device_kind
from pallas_kernels.ragged_paged_attention.layout import SplitLayout
from pallas_kernels.ragged_paged_attention.quantized import LARGEST, is_quantized, kind_of, quantize_new
from pallas_kernels.ragged_paged_attention.rotation import Rotation
from pallas_kernels.ragged_paged_attention.shared_tiles import SharedQueries, runs_of, runs_of_rows, shared_queries
from pallas_kernels.ragged_paged_attention.sharing import SharedWork
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import NOWHERE, token_places

MAX_HEAD_DIM, MAX_FLOAT32_HEAD_DIM = 512, 256
ALL_DECODE_TOKENS = 32  # steps up to here are not worth a second class of tiles
MAX_GROUP_SIZE = 128
LEAST_SHARING_TOKENS = 4  # steps of fewer share nothing, so their programs have nothing for it
SHARING_QUERIES = 16  # of a tile of 128 rows with eight query heads per kv head
MOST_SHARING_TILES = 192  # each leaves partial results of half a MiB, for 8 kv heads of 128
MOST_SLOTS = 128  # of an iteration, whatever is tuned
# What sharing costs a step whatever it saves, in slots that single queries read: two more launches take as long as
# reading 32 MB, 4 KiB a slot, and what is left of each token is written and read again.
SLOTS_OF_A_STEP, SLOTS_OF_A_TOKEN = 8192, 16
LEAST_TRITON = (3, 8)  # 3.7 takes a number out of a tuple of constants for one that a program computes
TYPES = tuple(jnp.dtype(x) for x in ("float32", "bfloat16", "float16"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Where each token's keys and values go, `NOWHERE` for padding tokens; and what rows share, if looked for. seen_T:
    where others hold the rest of every context, the last slot that each token sees of what is held, or -1.

    The lists of items depend on the number of heads, which is not known here. Layers make them, and XLA merges what
    equal layers compute from equal inputs.
    """

    slot_block_T: jax.Array
    slot_offset_T: jax.Array
    shared_6R: jax.Array | None
    seen_T: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class WorkClass:
    """The rows that one kind of tile serves, and the most tiles that they can make."""

    tiles: Tiles
    wanted_R: jax.Array
    num_tiles: int


@dataclasses.dataclass(frozen=True)
class GpuBackend:
    """The backend's functions. `interpret` runs the kernels in an interpreter, anywhere and very slowly.

    `is_pallas`: the kernels are those in Pallas (kernels.py), else those in Triton itself (triton_kernels.py); both
    take the same lists of work and the same cache. `choose` and `choose_mosaic` have the arguments and results of
    `choose_tiles` and `choose_mosaic_tiles`; scripts/tune_kernel.py tries others.
    """

    interpret: bool
    is_pallas: bool = True
    choose: Callable[..., Tiles] = choose_tiles
    choose_mosaic: Callable[..., MosaicTiles | None] = choose_mosaic_tiles

    LAYOUT = SplitLayout()

    def why_not(self, platform: str) -> str | None:
        if self.interpret:
            return binding_refusal(self.is_pallas, self.interpret)
        if platform != "gpu":
            name, owner = ("gpu", "Pallas") if self.is_pallas else ("gpu-triton", "Triton")
            simulated = f"'{name}-interpret' runs the same kernels in {owner}'s interpreter, for tests"
            return f"it needs an NVIDIA GPU; {simulated}"
        return binding_refusal(self.is_pallas, self.interpret) or device_refusal(present_capability())

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
        for name, dtype, accepted in (("q", q_dtype, TYPES), ("the cache", kv_dtype, (*TYPES, *LARGEST))):
            if dtype not in accepted:
                return f"{name} is {dtype}; accepted are {', '.join(map(str, accepted))}"
        operand = q_dtype if is_quantized(kv_dtype) else kv_dtype
        if head_dim > (most := MAX_HEAD_DIM if jnp.dtype(operand).itemsize == 2 else MAX_FLOAT32_HEAD_DIM):
            return f"head_dim = {head_dim}; accepted are at most {most} in products of {jnp.dtype(operand)}"
        if num_heads // num_kv_heads > MAX_GROUP_SIZE:
            return f"{num_heads // num_kv_heads} query heads per kv head; accepted are at most {MAX_GROUP_SIZE}"
        return None

    def shared_work(self, num_tokens: int, block_size: int) -> SharedWork | None:
        """Of a step with so many tokens, padding included; of the tiles only what holds for all shapes is known here.

        A tile of 128 rows takes one to two times as long as a single query, whose speed is the memory's.
        """
        if num_tokens < LEAST_SHARING_TOKENS:
            return None
        return SharedWork(
            unit=math.lcm(block_size, MOST_SLOTS),
            tile=SHARING_QUERIES,
            break_even=2,
            overhead=SLOTS_OF_A_STEP + SLOTS_OF_A_TOKEN * num_tokens,
            most_tiles=min(sharing.room_for_tiles(num_tokens, SHARING_QUERIES), MOST_SHARING_TILES),
            is_launched=True,
        )

    def make_plan(
        self,
        query_start_loc_R1: jax.Array,
        seq_lens_R: jax.Array,
        block_tables_RM: jax.Array,
        *,
        num_tokens: int,
        block_size: int,
        window: int | None,
        shared_6R: jax.Array | None = None,
        share: ContextShare | None = None,
        visible_end_T: jax.Array | None = None,
    ) -> Plan:
        """The plan of one step; see `make_metadata` for the arguments. With a `share` each row reads by itself.
        `visible_end_T` is for lists of items, which layers make."""
        row_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
        index_T, slot_T, is_here_T, seen_T = places_here(position_T, block_size, share)
        block_T = block_tables_RM.at[row_T, index_T].get(mode="clip")
        reads = (shared_6R, None) if share is None else (None, seen_T)
        return Plan(jnp.where(real_T & is_here_T, block_T, NOWHERE), slot_T, *reads)

    def rotates(self, kv_dtype: Any) -> bool:
        """Whether `rotate_and_write` is there for a cache of such numbers."""
        return self.is_pallas and not is_quantized(kv_dtype)

    def rotate_and_write(
        self, heads: tuple[jax.Array, ...], rotation: Rotation, kv: tuple[jax.Array, ...], metadata: Any
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """See `ragged_paged_attention.rotate_and_write`."""
        from pallas_kernels.ragged_paged_attention.gpu import rotated_write  # not where jax has no Pallas for Triton

        check_size(kv[0].size, kv[0].dtype)
        return rotated_write.rotate_and_write(heads, rotation, kv, metadata.plan, self.interpret)

    def attention(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        kv: tuple[jax.Array, ...],
        metadata: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_N: jax.Array | None,
        scales: tuple[jax.Array, ...] = (),
        undivided: bool = False,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """See `ragged_paged_attention`; `kv` is (k_BKSH, v_BKSH), `scales` are (k_BKS, v_BKS) or (k_K, v_K).

        Raises ValueError for a scale that is not positive, and for a cache whose size the kernels cannot address, see
        `check_size`.
        """
        check_size(kv[0].size, kv[0].dtype)
        if scale <= 0:
            raise ValueError(
                f"scale = {scale}, with which larger scores are smaller weights; accepted are positive ones"
            )
        calls = binding_of(self.is_pallas)
        (T, N, H), K = q_TNH.shape, kv[0].shape[1]
        if k_TKH is not None:
            new = new_slots(k_TKH, v_TKH, kv[0].dtype, scales)
            written = calls.write(new, (*kv, *scales)[: len(new)], metadata.plan, self.interpret)
            kv, scales = written[:2], written[2:] or scales
        sees_ahead = metadata.visible_end_T is not None
        rule = LayerRule(scale, window, soft_cap, sinks_N is not None, kind_of(scales), sees_ahead)
        sinks_N = jnp.zeros(N, jnp.float32) if sinks_N is None else sinks_N.astype(jnp.float32)
        kind = device_kind(self.interpret)
        if undivided:
            return self.attend_part(rule, metadata, sinks_N, q_TNH, kv, scales), kv, scales
        if k_TKH is not None:
            # Outputs take the place of their queries. XLA would make zeros to begin with for all layers at once.
            q_TNH = jnp.where((jnp.arange(T) < metadata.query_start_loc_R1[-1])[:, None, None], q_TNH, 0)
        own_R, begun = None, ()
        if metadata.plan.shared_6R is not None:
            own_R = metadata.plan.shared_6R[sharing.OWN]
            begun = self.attend_spans(rule, metadata, sinks_N, q_TNH, kv, scales)
        mosaic = self.mosaic_tiles(rule, q_TNH, kv[0], bool(begun), kind)
        for work in self.work_classes(metadata, T, N // K, H, kv[0].dtype, kind, mosaic):
            sizes = work.tiles.sizes(N // K, K, kind)
            items = make_items(metadata, work.wanted_R, work.num_tiles, sizes, window, own_R, metadata.visible_end_T)
            layer = (metadata, sinks_N, q_TNH, kv, scales)
            attend = calls.attend if work.tiles is not mosaic else mosaic_binding().attend
            q_TNH = attend(rule, work.tiles, sizes, items, *layer, begun, self.interpret)
        return q_TNH, kv, scales

    def mosaic_tiles(
        self, rule: LayerRule, q_TNH: jax.Array, k_BKSH: jax.Array, begins: bool, kind: str
    ) -> MosaicTiles | None:
        """The tiles of prompts where Mosaic's kernel takes them: where it is known to be faster, and can."""
        if not self.is_pallas:
            return None
        (T, N, H), (_, K, S, _) = q_TNH.shape, k_BKSH.shape
        tiles = self.choose_mosaic(N // K, H, k_BKSH.dtype, kind)
        if tiles is None:
            return None
        heads = {"num_tokens": T, "group_size": N // K, "head_dim": H, "block_size": S}
        types = {"q_dtype": q_TNH.dtype, "kv_dtype": k_BKSH.dtype}
        return None if mosaic_cannot_take(tiles, rule, **heads, **types, shares=begins, kind=kind) else tiles

    def attend_spans(
        self, rule: LayerRule, metadata: Any, sinks_N: jax.Array, q_TNH: jax.Array, kv: Any, scales: Any
    ) -> tuple[jax.Array, ...]:
        """What spans that rows share leave of each query, see `calls.attend_spans`."""
        (T, N, H), (_, K, S, _), kind = q_TNH.shape, kv[0].shape, device_kind(self.interpret)
        shared_6R, cost = metadata.plan.shared_6R, self.shared_work(T, S)
        tiles = self.choose("prefill", N // K, H, kv[0].dtype, kind)
        sizes = tiles.sizes(N // K, K, kind)
        where = metadata.query_start_loc_R1, metadata.seq_lens_R
        queries = shared_queries(shared_6R, *where, T, sizes.queries, metadata.visible_end_T)
        most_runs = cost.most_tiles * max(1, cost.tile // sizes.queries)  # there are as many more of smaller tiles
        runs = runs_of(shared_6R, queries, sizes.queries, rule.window, most_runs)
        num_tiles = len(queries.token_Y) // sizes.queries
        items = make_span_items(runs, queries.before_R1[-1], num_tiles, sizes)
        layer = (metadata, sinks_N, q_TNH, kv, scales)
        return binding_of(self.is_pallas).attend_spans(rule, tiles, sizes, items, queries, *layer, self.interpret)

    def attend_part(
        self, rule: LayerRule, metadata: Any, sinks_N: jax.Array, q_TNH: jax.Array, kv: Any, scales: Any
    ) -> jax.Array:
        """What of each query's context is held here, [T, N, H + 2]: as if it were one slot, whose value is what all add
        up to and whose score is their weight. Rows' own pieces of context are spans that they share with nobody."""
        (T, N, H), K, kind = q_TNH.shape, kv[0].shape[1], device_kind(self.interpret)
        start_R1, seen_T = metadata.query_start_loc_R1, metadata.plan.seen_T
        are_few = T <= ALL_DECODE_TOKENS or metadata.decodes_only
        tiles = self.choose("decode" if are_few else "prefill", N // K, H, kv[0].dtype, kind)
        sizes = tiles.sizes(N // K, K, kind)
        num_tiles = ceil_div(T, sizes.queries)
        seen_Y = jnp.pad(seen_T, (0, num_tiles * sizes.queries - T))
        queries = SharedQueries(jnp.arange(len(seen_Y), dtype=jnp.int32), seen_Y, start_R1)
        items = make_span_items(runs_of_rows(start_R1, seen_T, sizes.queries), start_R1[-1], num_tiles, sizes)
        layer = (metadata, sinks_N, q_TNH, kv, scales)
        out_TNH, top_TN = binding_of(self.is_pallas).attend_spans(
            rule, tiles, sizes, items, queries, *layer, self.interpret
        )
        is_seeing_T1 = ((jnp.arange(T) < start_R1[-1]) & (seen_T >= 0))[:, None]
        top_TN = jnp.where(is_seeing_T1, top_TN / LOG2_E, LOWEST)
        out_TNH = jnp.where(is_seeing_T1[..., None], out_TNH, 0)
        return jnp.concatenate([out_TNH, jnp.ones_like(top_TN)[..., None], top_TN[..., None]], axis=-1)

    def work_classes(
        self,
        metadata: Any,
        num_tokens: int,
        group_size: int,
        head_dim: int,
        dtype: Any,
        kind: str,
        mosaic: MosaicTiles | None = None,
    ) -> list[WorkClass]:
        """Decodes and everything else, or all rows as decodes when the step is small. `mosaic`: everything else's, if
        Mosaic's kernel takes that."""
        start_R1 = metadata.query_start_loc_R1
        num_queries_R = start_R1[1:] - start_R1[:-1]
        R, T = len(num_queries_R), num_tokens
        few = self.choose("decode", group_size, head_dim, dtype, kind)
        most = few.queries(group_size)
        if T <= ALL_DECODE_TOKENS or metadata.decodes_only:
            return [WorkClass(few, num_queries_R > 0, min(T, T // most + R))]
        many = mosaic or self.choose("prefill", group_size, head_dim, dtype, kind)
        num_others = min(R, T // (most + 1))  # a row that is no decode has more than `most` tokens
        num_tiles = min(T, T // many.queries(group_size) + num_others)
        return [
            WorkClass(few, num_queries_R <= most, min(T, R)),
            WorkClass(many, num_queries_R > most, num_tiles),
        ]


def binding_of(is_pallas: bool) -> ModuleType:
    """The module that launches kernels; what it needs is imported no earlier, and takes a third of a second."""
    name = "calls" if is_pallas else "triton_calls"
    return importlib.import_module(f"pallas_kernels.ragged_paged_attention.gpu.{name}")


def mosaic_binding() -> ModuleType:
    """The module that launches Mosaic's kernel."""
    return importlib.import_module("pallas_kernels.ragged_paged_attention.gpu.mosaic_calls")


def present_capability() -> str | None:
    """The compute capability of the GPU here, such as "9.0", or None where there is none: then it is described."""
    try:
        return jax.devices("gpu")[0].compute_capability
    except RuntimeError:
        return None


def binding_refusal(is_pallas: bool, interpret: bool) -> str | None:
    """Why kernels cannot be launched, or interpreted, by what is installed, or None."""
    if is_pallas:
        installed = is_installed("jax.experimental.pallas.triton")
        return None if installed else "this jax has no Pallas for Triton; 'gpu-triton' runs kernels in Triton itself"
    missing = [name for name in ("jax_triton", "triton")[interpret:] if not is_installed(name)]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; install jax-triton and triton, the extra gpu-triton"
    version = version_of("triton")
    if (found := re.match(r"(\d+)\.(\d+)", version)) and tuple(map(int, found.groups())) < LEAST_TRITON:
        least = ".".join(map(str, LEAST_TRITON))
        return f"triton {version} is installed, which cannot compile its kernels; {least} and newer can"
    if interpret == (os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    if interpret:
        return "Triton reads the environment variable TRITON_INTERPRET when it is imported; set it to 1"
    return "the environment variable TRITON_INTERPRET has Triton interpret its kernels; unset it"


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def version_of(package: str) -> str:
    """Nothing where what is importable came under another name, as PyTorch's own builds of Triton do."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def device_refusal(capability: str | None) -> str | None:
    """Why the kernels cannot run on a GPU of this compute capability, or None."""
    if capability is None or (capability[0].isdigit() and float(capability) >= 8.0):
        return None
    return f"it needs an NVIDIA GPU of compute capability 8.0 or more, and this one has {capability}"


def check_size(size: int, dtype: Any) -> None:
    """Raise ValueError for arrays whose elements cannot be numbered in the integers that jax chooses for them.

    Up to 2**32 bytes jax has Pallas compute in 32 bits, with a sign: too few for more than 2**31 numbers of 8 bits.
    """
    if jnp.dtype(dtype).itemsize == 1 and 2**31 < size <= 2**32:
        raise ValueError(
            f"the 'gpu' attention backend cannot address a cache of 8 bits with {size} numbers in each layer's keys; "
            f"accepted are up to {2**31}, or more than {2**32}. Give the cache fewer or more blocks."
        )


def new_slots(k_TKH: jax.Array, v_TKH: jax.Array, dtype: Any, scales: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """What the cache stores of new keys and values: both, in its type, and their scales where tokens have them."""
    if not is_quantized(dtype):
        return k_TKH, v_TKH
    (k_TKH, k_scale_TK), (v_TKH, v_scale_TK) = (
        quantize_new(x_TKH, scale, dtype) for x_TKH, scale in zip((k_TKH, v_TKH), scales or (None, None))
    )
    return (k_TKH, v_TKH, k_scale_TK, v_scale_TK) if kind_of(scales) == "token" else (k_TKH, v_TKH)
