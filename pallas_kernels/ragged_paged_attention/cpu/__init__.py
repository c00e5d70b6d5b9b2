"""Attention on a CPU in machine code of our own (`pallas_kernels/llvm`): a kernel for single queries, one for tiles,
one that joins what they have come to, one that writes new keys and values, and one that says of each step what they do.

What the kernels do not know, such as quantised caches, goes the reference's way.

Layout: the reference's.

Grid: a chunk of work is handed to XLA's threads after the other. `singles.py`: each token, some neighbouring kv heads
and a part of the context, 16 KiB of a block's keys at a time, since memory is slow where every page is another. A
context has one part in steps of 16 tokens and more, and more of them in smaller steps, for the threads' sake.
`tiles.py`: up to 96 queries of a kv head. It is called twice: for spans of blocks that several rows hold, then for
rows with `TILED_FROM` new tokens and more.

Skipping: what the reference skips, at the grain of a slot, or of 64 slots in tiles.

Requires: AVX2 and FMA, better AVX512; keys and values of bfloat16 or float32 and queries of the same type, heads of a
multiple of 16 numbers up to 256, blocks of a multiple of 16 slots, up to 8 query heads for each kv head.

Padding: of the last tile of a range, keys are read and not counted, and values not read. Tokens beyond the last row's
have no work; what kernels leave for them is not looked at.

Numerics: scores, softmax and weights are float32. Single queries: the sums of a part are in the order of the context,
lane by lane; how many parts there are depends on the number of tokens of the step. Tiles: sums are in the order of the
context, 64 slots with one maximum; whatever else is in a tile changes no bit. Nor do threads. With AVX512-BF16 and
bfloat16 both multiply weights rounded to bfloat16, and divide by the sum of these: 1.5 to 1.8 x the speed of tiles.

Cost: reads each key and value once for all queries of a head and token, or of a tile; XLA gathers them into an array
first, reads that twice and writes scores (`scripts/bench_attention.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.context_share import ContextShare
from pallas_kernels.llvm import machine as llvm
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine
from pallas_kernels.ragged_paged_attention import reference, work_lists
from pallas_kernels.ragged_paged_attention.cpu import plans
from pallas_kernels.ragged_paged_attention.cpu.plans import MULTIPLE, TILED_FROM, KernelPlan
from pallas_kernels.ragged_paged_attention.numerics import LOWEST
from pallas_kernels.ragged_paged_attention.sharing import SharedWork

OP = "ragged_paged_attention"
LAYOUT = reference.LAYOUT
cannot_take = reference.cannot_take

QUERIES, DTYPES, SCORES = ("singles", "tiles"), ("bfloat16", "float32"), ("plain", "capped")
PLANS = "rows", "spans", "rows_ahead", "spans_ahead"
AROUND = {"joined": DTYPES, "undivided": ("float32",), "written": DTYPES, "planned": PLANS}
"""What kernels do that are the same for all heads, with the kinds of each: join queries' parts, and divide or not;
write the cache; and what all of them are told of a step, with spans or without, where tokens see ahead or do not."""
MOST_HEAD_DIM, MOST_GROUP = 256, 8
PLANNED = (
    "slot_block_T",
    "slot_offset_T",
    "how_T",
    "seen_T2",
    "row_T",
    "token_T",
    "ranges_PT2",
    "rows_6L",
)
PLANNED_OF_SPANS = "spans_6L", "span_token_X"
"""Fields of a plan that its kernel writes, in this order, and those where there may be spans."""
NONE = np.zeros((1, 1, 1, 1), np.float32)
"""In place of what spans or tiles have come to, where there are none: no token's flags say that it has any."""
NO_SINKS = np.array([LOWEST], np.float32)
"""One for all heads, which XLA makes no kernel of."""
SHARED_TILE = 32
"""Queries of a tile of several rows, supposed that a kv head has a few of each."""


def why_not(platform: str) -> str | None:
    return llvm.why_not() if platform == "cpu" else "it needs a CPU"


def shared_work(num_tokens: int, block_size: int) -> SharedWork | None:
    """Of a step with so many tokens, padding included; None where they are too few for sharing ever to pay."""
    unit, _ = work_lists.item_and_chunk_slots(block_size)
    return SharedWork(unit, SHARED_TILE, TILED_FROM) if num_tokens > TILED_FROM else None


def kernel_cannot_take(dtype: Any, kv_dtype: Any, group_size: int, head_dim: int, block_size: int) -> str | None:
    """Why single queries go XLA's way with such heads and blocks, or None."""
    dtype, kv_dtype = str(jnp.dtype(dtype)), str(jnp.dtype(kv_dtype))
    if dtype not in DTYPES or kv_dtype != dtype:
        return f"queries are {dtype}, keys and values {kv_dtype}; accepted are {' and '.join(DTYPES)}, all alike"
    if head_dim % MULTIPLE or not 0 < head_dim <= MOST_HEAD_DIM:
        return f"head_dim = {head_dim}; accepted are multiples of {MULTIPLE} up to {MOST_HEAD_DIM}"
    if block_size % MULTIPLE or block_size <= 0:
        return f"block_size = {block_size}; accepted are multiples of {MULTIPLE}"
    if not 0 < group_size <= MOST_GROUP:
        return f"{group_size} query heads for each kv head; accepted are 1 to {MOST_GROUP}"
    return None


def kernel(work: str, kind: str, *heads: str | int, machine: Machine) -> str:
    """What XLA calls a kernel; from now on it is known. `work` is one of `AROUND`, or "singles" or "tiles": then `kind`
    is a type, and `heads` are their group size, head dim, block size, and scores, "plain" or "capped".

    Raises ValueError where there is none.
    """
    if work not in AROUND:
        return _kernel_of_queries(work, kind, *heads, machine=machine)
    if heads or kind not in AROUND[work]:
        accepted = " or ".join(AROUND[work])
        raise ValueError(
            f"there is no kernel for what is {work} as {'.'.join(map(str, (kind, *heads)))}; but {accepted}."
        )
    return register(OP, _emit_around, work, kind, machine=machine)


def _kernel_of_queries(
    queries: str,
    dtype: str,
    group_size: str | int,
    head_dim: str | int,
    block_size: str | int,
    scores: str | int,
    *,
    machine: Machine,
) -> str:
    numbers = int(group_size), int(head_dim), int(block_size)
    wrong = f"there is no kernel for {queries} of {dtype} and {scores!r} scores"
    if queries not in QUERIES or dtype not in DTYPES or scores not in SCORES:
        accepted = f"{' and '.join(QUERIES)} of {' and '.join(DTYPES)}, with {' or '.join(SCORES)} scores"
        raise ValueError(f"{wrong}; there are for {accepted}.")
    reason = kernel_cannot_take(dtype, dtype, *numbers)
    if reason is not None:
        raise ValueError(f"{wrong}: {reason}.")
    return register(OP, _emit_queries, queries, dtype, *numbers, scores, machine=machine)


def make_plan(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    block_size: int,
    window: int | None,
    shared_6R: jax.Array | None = None,
    share: ContextShare | None = None,
    visible_end_T: jax.Array | None = None,
    **settings: Any,
) -> KernelPlan:
    """The reference's plan, and what the kernels are told."""
    rows = query_start_loc_R1, seq_lens_R, block_tables_RM
    settings |= {"block_size": block_size, "window": window, "shared_6R": shared_6R, "share": share}
    plan = plans.by_xla(*rows, **settings, visible_end_T=visible_end_T)
    if share is not None:
        return plan
    names, kind, shared, ends = PLANNED, "rows", (), ()
    if shared_6R is not None:
        names, kind, shared = (*names, *PLANNED_OF_SPANS), "spans", (shared_6R,)
    if visible_end_T is not None:
        kind, ends = f"{kind}_ahead", (visible_end_T,)
    shapes = [getattr(plan, name).shape for name in names] + [query_start_loc_R1.shape] * len(shared)
    results = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    call = jax.ffi.ffi_call(kernel("planned", kind, machine=this_machine()), results)
    planned = call(*rows, np.array([block_size, window or 0], np.int32), *shared, *ends)
    return dataclasses.replace(plan, **dict(zip(names, planned)))


def attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    kv: tuple[jax.Array, jax.Array],
    metadata: Any,
    *,
    machine: Machine | None = None,
    **settings: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """See `ragged_paged_attention`. `machine`: a CPU with less than this one has, in tests."""
    (S, H), group_size = kv[0].shape[2:], q_TNH.shape[1] // kv[0].shape[1]
    if kernel_cannot_take(q_TNH.dtype, kv[0].dtype, group_size, H, S) is not None:
        return reference.attention(q_TNH, k_TKH, v_TKH, kv, metadata, **settings)
    machine = machine or this_machine()
    if k_TKH is not None and v_TKH is not None:
        kv = _written(kv, k_TKH, v_TKH, metadata.plan, machine)
    calls = _Calls(q_TNH, kv, metadata, settings["scale"], settings["soft_cap"], machine)
    out_TNX = _finished(calls, settings["sinks_N"], settings.get("undivided", False))
    return out_TNX, kv, ()


def _written(
    kv: tuple[jax.Array, jax.Array], k_TKH: jax.Array, v_TKH: jax.Array, plan: KernelPlan, machine: Machine
) -> tuple[jax.Array, jax.Array]:
    """The cache with new keys and values, where it was."""
    name = kernel("written", str(kv[0].dtype), machine=machine)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kv]
    call = jax.ffi.ffi_call(name, results, input_output_aliases={0: 0, 1: 1})
    new = (x_TKH.astype(x.dtype) for x_TKH, x in zip((k_TKH, v_TKH), kv))
    k_BKSH, v_BKSH = call(*kv, *new, plan.slot_block_T, plan.slot_offset_T)
    return k_BKSH, v_BKSH


def _finished(calls: "_Calls", sinks_N: jax.Array | None, undivided: bool) -> jax.Array:
    """What single queries and tiles have come to, as `ragged_paged_attention` returns it."""
    metadata, plan = calls.metadata, calls.metadata.plan
    T, K, G, _ = calls.q_TKGH.shape
    begun_TKGP = tiles_TKGP = None
    if plan.spans_6L is not None:
        begun_TKGP = calls.tiles(plan.span_token_X, plan.spans_6L)
    if not metadata.decodes_only and T >= TILED_FROM:
        tiles_TKGP = calls.tiles(plan.token_T, plan.rows_6L, begun_TKGP)
    sinks_N = NO_SINKS if sinks_N is None else sinks_N.astype(jnp.float32)
    return calls.joined(calls.singles(), begun_TKGP, tiles_TKGP, sinks_N, undivided).reshape(T, K * G, -1)


class _Calls:
    """The kernels' calls of one layer."""

    def __init__(
        self,
        q_TNH: jax.Array,
        kv: tuple[jax.Array, jax.Array],
        metadata: Any,
        scale: float,
        soft_cap: float | None,
        machine: Machine,
    ):
        self.kv, self.metadata, self.machine = kv, metadata, machine
        _, K, S, H = kv[0].shape
        T, N, _ = q_TNH.shape
        self.q_TKGH, self.dtype = q_TNH.reshape(T, K, N // K, H), str(kv[0].dtype)
        self.scores = "plain" if soft_cap is None else "capped"
        self.settings_2 = jnp.array([scale, 1.0 if soft_cap is None else soft_cap], jnp.float32)
        self.heads = N // K, H, S

    def singles(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What each part of a context gives to its token, as (out_PTKGH, total_PTKG, top_PTKG) of a `Softmax`; anything
        for tokens without a row."""
        plan, q_TKGH, H = self.metadata.plan, self.q_TKGH, self.q_TKGH.shape[-1]
        if not _multiplies_pairs(self.dtype, H, self.machine):
            q_TKGH = q_TKGH.astype(jnp.float32)  # what the kernel makes of keys
        shape = (len(plan.ranges_PT2), *q_TKGH.shape[:-1])
        results = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, H), shape, shape)]
        tables_RM = self.metadata.block_tables_RM
        arguments = (q_TKGH, *self.kv, plan.ranges_PT2, plan.row_T, tables_RM, self.settings_2)
        out, total, top = self._call("singles", results, *arguments)
        return out, total, top

    def tiles(self, token_X: jax.Array, sources_6L: jax.Array, begun_TKGP: jax.Array | None = None) -> jax.Array:
        """What sources come to, as `numerics.packed`; anything for tokens that have none. `begun_TKGP`: what queries
        begin with where sources say so."""
        *shape, H = self.q_TKGH.shape
        result = jax.ShapeDtypeStruct((*shape, H + 2), jnp.float32)
        begun = NONE if begun_TKGP is None else begun_TKGP
        plan, tables_RM = self.metadata.plan, self.metadata.block_tables_RM
        arguments = (self.q_TKGH, *self.kv, token_X, plan.seen_T2, sources_6L, tables_RM, begun, self.settings_2)
        return self._call("tiles", result, *arguments)

    def joined(
        self,
        parts: tuple[jax.Array, jax.Array, jax.Array],
        begun_TKGP: jax.Array | None,
        tiles_TKGP: jax.Array | None,
        sinks_N: jax.Array,
        undivided: bool,
    ) -> jax.Array:
        """Of each token, what its flags say that it has."""
        *shape, H = self.q_TKGH.shape
        work, dtype = ("undivided", jnp.dtype("float32")) if undivided else ("joined", self.q_TKGH.dtype)
        result = jax.ShapeDtypeStruct((*shape, H + 2 * undivided), dtype)
        packed = (NONE if x is None else x for x in (begun_TKGP, tiles_TKGP))
        call = jax.ffi.ffi_call(kernel(work, str(dtype), machine=self.machine), result)
        return call(*parts, *packed, self.metadata.plan.how_T, sinks_N)

    def _call(self, queries: str, results: Any, *arguments: jax.Array) -> Any:
        name = kernel(queries, self.dtype, *self.heads, self.scores, machine=self.machine)
        return jax.ffi.ffi_call(name, results)(*arguments)


def _multiplies_pairs(dtype: str, head_dim: int, machine: Machine) -> bool:
    return dtype == "bfloat16" and has_pairs(machine) and head_dim % (2 * machine.lanes) == 0


def _emit_queries(
    queries: str, dtype: str, group_size: int, head_dim: int, block_size: int, scores: str, machine: Machine
) -> Any:
    from pallas_kernels.ragged_paged_attention.cpu import singles, tiles  # these need llvmlite
    from pallas_kernels.ragged_paged_attention.cpu.heads import Heads

    pairs = _multiplies_pairs(dtype, head_dim, machine)
    heads = Heads(
        dtype, group_size, head_dim, block_size, scores == "capped", machine.lanes, machine.num_registers, pairs
    )
    return {"singles": singles, "tiles": tiles}[queries].kernel(heads)


def _emit_around(work: str, kind: str, machine: Machine) -> Any:
    from pallas_kernels.ragged_paged_attention.cpu import joining, planning, writing  # these need llvmlite

    if work == "planned":
        return planning.kernel(has_spans=kind.startswith("spans"), has_ends=kind.endswith("_ahead"))
    if work == "written":
        return writing.kernel(jnp.dtype(kind).itemsize)
    return joining.kernel(kind, work == "joined", machine.lanes)
