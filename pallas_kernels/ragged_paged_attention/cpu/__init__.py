"""Attention on a CPU whose lists of single queries are machine code of our own (`pallas_kernels/llvm`): decoding.

Tiles of queries, and all that the kernel does not know, are XLA's, as in the reference.

Layout: the reference's.

Grid: a chunk of work for each token, some neighbouring kv heads and a part of the context, handed to XLA's threads one
after the other: 16 KiB of a block's keys at a time, since memory is slow where every page is another. A context has one
part in steps of 16 tokens and more, and more of them in smaller steps, for the threads' sake.

Skipping: what the reference skips, at the grain of a slot. Tokens of tiles are chunks of nothing.

Requires: AVX2 and FMA, better AVX512; keys and values of bfloat16 or float32 and queries of the same type, heads of a
multiple of 16 numbers up to 256, blocks of a multiple of 16 slots, up to 8 query heads for each kv head.

Padding: of the last tile of a range, keys are read and not counted, and values not read.

Numerics: scores, softmax and weights are float32; the sums of a part are in the order of the context, lane by lane, so
threads change no bit. How many parts there are depends on the number of tokens of the step.

Cost: reads each key and value once for all queries of a head and token; XLA gathers them into an array first, reads
that twice and writes scores (`scripts/bench_attention.py`).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.context_share import ContextShare
from pallas_kernels.llvm import machine as llvm
from pallas_kernels.llvm.code import register
from pallas_kernels.llvm.machine import Machine, has_pairs, this_machine
from pallas_kernels.ragged_paged_attention import reference, sharing, work_lists
from pallas_kernels.ragged_paged_attention.numerics import Softmax, unpacked
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import first_visible, token_places

OP = "ragged_paged_attention"
LAYOUT = reference.LAYOUT
cannot_take = reference.cannot_take
shared_work = reference.shared_work

DTYPES, SCORES = ("bfloat16", "float32"), ("plain", "capped")
MULTIPLE, MOST_HEAD_DIM, MOST_GROUP = 16, 256, 8
PARTS = 16
"""Parts of contexts that a step has at least, its tokens taken together: work for so many threads with one kv head."""
LEAST_PART_SLOTS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelPlan(work_lists.Plan):
    """The reference's, and for each token its row and the slots [begin, end) of each part of the context that it reads
    by itself; none for tokens of tiles and padding, which are not `listed_T`."""

    row_T: jax.Array
    listed_T: jax.Array
    ranges_PT2: jax.Array


def why_not(platform: str) -> str | None:
    return llvm.why_not() if platform == "cpu" else "it needs a CPU"


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


def kernel(
    dtype: str, group_size: int, head_dim: int, block_size: int, scores: str = "plain", *, machine: Machine
) -> str:
    """What XLA calls the kernel for such heads; from now on it is known. `scores` are "plain" or "capped".

    Raises ValueError where there is none.
    """
    numbers = int(group_size), int(head_dim), int(block_size)
    if dtype not in DTYPES or scores not in SCORES:
        accepted = f"{' and '.join(DTYPES)}, with {' or '.join(SCORES)} scores"
        raise ValueError(f"there is no kernel for {dtype} and {scores!r} scores; there are for {accepted}.")
    reason = kernel_cannot_take(dtype, dtype, *numbers)
    if reason is not None:
        raise ValueError(f"there is no kernel for {dtype} and {scores!r} scores: {reason}.")
    return register(OP, _emit, dtype, *numbers, scores, machine=machine)


def make_plan(
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    block_tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
    window: int | None,
    shared_6R: jax.Array | None = None,
    share: ContextShare | None = None,
) -> KernelPlan:
    """The reference's plan, and what the kernel is told of each token."""
    plan = work_lists.make_plan(
        query_start_loc_R1, seq_lens_R, block_tables_RM,
        num_tokens=num_tokens, block_size=block_size, window=window, shared_6R=shared_6R, share=share,
    )  # fmt: skip
    row_T, _, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    position_T = plan.position_T
    row_T = jnp.clip(row_T, 0, len(seq_lens_R) - 1)
    own_R = jnp.zeros_like(seq_lens_R) if shared_6R is None else shared_6R[sharing.OWN]
    listed_T = real_T & (jnp.diff(plan.item_end_R, prepend=0) > 0)[row_T]
    begin_T = jnp.where(listed_T, jnp.maximum(first_visible(position_T, window), own_R[row_T]), 0)
    end_T = jnp.where(listed_T, position_T + 1, 0)
    num_parts = max(1, PARTS // num_tokens)
    begin_PT = begin_T[None] // MULTIPLE * MULTIPLE
    length_T = ceil_div(ceil_div(end_T - begin_PT[0], num_parts), MULTIPLE) * MULTIPLE
    length_T = jnp.maximum(length_T, LEAST_PART_SLOTS) if num_parts > 1 else length_T
    begin_PT = begin_PT + jnp.arange(num_parts)[:, None] * length_T
    end_PT = jnp.minimum(begin_PT + length_T, end_T)
    ranges_PT2 = jnp.stack([jnp.minimum(jnp.maximum(begin_PT, begin_T), end_PT), end_PT], axis=-1)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return KernelPlan(**fields, row_T=row_T, listed_T=listed_T, ranges_PT2=ranges_PT2.astype(jnp.int32))


def attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: tuple[jax.Array, jax.Array],
    metadata: Any,
    *,
    machine: Machine | None = None,
    **settings: Any,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """See `ragged_paged_attention`. `machine`: a CPU with less than this one has, in tests."""
    (S, H), group_size = kv[0].shape[2:], q_TNH.shape[1] // k_TKH.shape[1]
    reason = kernel_cannot_take(q_TNH.dtype, kv[0].dtype, group_size, H, S)
    if reason is not None:
        return reference.attention(q_TNH, k_TKH, v_TKH, kv, metadata, **settings)

    def attend_items(problem: Any, out_TKGH: jax.Array, part_TKGP: jax.Array | None) -> jax.Array:
        return _attend_items(problem, out_TKGH, part_TKGP, machine or this_machine())

    return reference.attention(q_TNH, k_TKH, v_TKH, kv, metadata, attend_items=attend_items, **settings)


def _attend_items(
    problem: reference.Problem, out_TKGH: jax.Array, part_TKGP: jax.Array | None, machine: Machine
) -> jax.Array:
    """Fill in the outputs of the tokens that read their contexts by themselves."""

    def filled(out_TKGH: jax.Array) -> jax.Array:
        state_TKG = _merged(_call(problem, machine))
        if part_TKGP is not None:
            state_TKG = problem.numerics.add(unpacked(part_TKGP), state_TKG)
        result_TKGH = problem.numerics.divide(state_TKG, problem.sinks_KG).astype(out_TKGH.dtype)
        return jnp.where(problem.metadata.plan.listed_T[:, None, None, None], result_TKGH, out_TKGH)

    if problem.metadata.decodes_only:
        return filled(out_TKGH)
    return lax.cond(problem.metadata.plan.item_end_R[-1] > 0, filled, lambda out_TKGH: out_TKGH, out_TKGH)


def _call(problem: reference.Problem, machine: Machine) -> Softmax:
    """What each part of a context gives to its token, [P, T, K, G]."""
    plan, q_TKGH = problem.metadata.plan, problem.q_TKGH
    dtype, (T, K, G, H), S = str(problem.k_BKSH.dtype), q_TKGH.shape, problem.k_BKSH.shape[2]
    if not _multiplies_pairs(dtype, H, machine):
        q_TKGH = q_TKGH.astype(jnp.float32)  # what the kernel makes of keys
    cap = problem.soft_cap
    name = kernel(dtype, G, H, S, "plain" if cap is None else "capped", machine=machine)
    heads = (len(plan.ranges_PT2), T, K, G)
    call = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*heads, H), heads, heads)])
    settings_2 = jnp.array([problem.scale, 1.0 if cap is None else cap], jnp.float32)
    tables_RM = problem.metadata.block_tables_RM
    out, total, top = call(
        q_TKGH, problem.k_BKSH, problem.v_BKSH, plan.ranges_PT2, plan.row_T.astype(jnp.int32), tables_RM, settings_2
    )
    return Softmax(top, total, out)


def _merged(part_PTKG: Softmax) -> Softmax:
    """The parts of each token's context as one."""
    if len(part_PTKG.top) == 1:
        return jax.tree.map(lambda x: x[0], part_PTKG)
    top_TKG = part_PTKG.top.max(axis=0)
    weight_PTKG = jnp.exp(part_PTKG.top - top_TKG)
    out_TKGH = (part_PTKG.out * weight_PTKG[..., None]).sum(axis=0)
    return Softmax(top_TKG, (part_PTKG.total * weight_PTKG).sum(axis=0), out_TKGH)


def _multiplies_pairs(dtype: str, head_dim: int, machine: Machine) -> bool:
    return dtype == "bfloat16" and has_pairs(machine) and head_dim % (2 * machine.lanes) == 0


def _emit(dtype: str, group_size: int, head_dim: int, block_size: int, scores: str, machine: Machine) -> Any:
    from pallas_kernels.ragged_paged_attention.cpu import instructions  # needs llvmlite

    pairs = _multiplies_pairs(dtype, head_dim, machine)
    return instructions.kernel(
        instructions.Heads(
            dtype, group_size, head_dim, block_size, scores == "capped", machine.lanes, machine.num_registers, pairs
        )
    )
