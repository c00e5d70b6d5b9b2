"""What attention's kernels for CPUs are told of a step: which queries each of them reads, and which slots.

`by_xla` is the definition. The kernel of `planning.py` says the same, except for holders of a part of each context,
of what is in use: for tokens that have no row to themselves anything may stand in their parts.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.context_share import ContextShare
from pallas_kernels.ragged_paged_attention import sharing, work_lists
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import NOWHERE, first_visible, token_places

MULTIPLE = 16
"""Parts of contexts begin at multiples of so many slots."""
PARTS = 16
"""Parts of contexts that a step has at least, its tokens taken together: work for so many threads with one kv head."""
LEAST_PART_SLOTS = 64
REAL, TILED, SHARES = 1, 2, 4
"""Flags of a token: it is no padding; it is in a tile of its row; it begins with what spans have come to."""
TILED_FROM = 4
"""As many queries of a row as are read in the same time in a tile and one by one."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KernelPlan(work_lists.Plan):
    """The reference's, for what goes its way, and what the kernels are told.

    Of each token: its flags, how_T; which slots [first, last] it sees. row_T: its row if it is read by itself, -1
    otherwise; then ranges_PT2 are slots [begin, end) of the parts of the context. rows_6L and spans_6L: sources of
    tiles (`tiles.py`), with tokens in the order of the step, token_T, and in that of span_token_X; None where nobody
    looked for spans.
    """

    how_T: jax.Array
    seen_T2: jax.Array
    row_T: jax.Array
    token_T: jax.Array
    ranges_PT2: jax.Array
    rows_6L: jax.Array
    spans_6L: jax.Array | None
    span_token_X: jax.Array | None


def by_xla(
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
) -> KernelPlan:
    """The plan of one step; see `make_metadata` for the arguments."""
    where = {"num_tokens": num_tokens, "block_size": block_size, "window": window, "share": share}
    plan = work_lists.make_plan(query_start_loc_R1, seq_lens_R, block_tables_RM, shared_6R=shared_6R, **where)
    position_T, token_T = plan.position_T, jnp.arange(num_tokens, dtype=jnp.int32)
    row_T, _, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    own_R = jnp.zeros_like(seq_lens_R) if shared_6R is None else shared_6R[sharing.OWN]
    tiled_R = jnp.diff(query_start_loc_R1) >= TILED_FROM
    own_T, tiled_T = own_R[row_T], tiled_R[row_T]
    first_T = first_visible(position_T, window)
    begin_T = jnp.maximum(first_T, own_T)
    end_T = position_T + 1 if visible_end_T is None else visible_end_T
    ranges_PT2 = parts(begin_T, end_T, max(1, PARTS // num_tokens))
    start_R, row_R = query_start_loc_R1[:-1], jnp.arange(len(seq_lens_R), dtype=jnp.int32)
    last_R = jnp.where(tiled_R, query_start_loc_R1[1:], start_R)
    rows_6L = _stacked([start_R, last_R, row_R, own_R, jnp.full_like(own_R, NOWHERE), own_R])
    spans_6L = span_token_X = None
    if shared_6R is not None:
        spans = work_lists.tiles_of_spans(shared_6R, query_start_loc_R1, token_T)
        lines = spans.first_L, spans.last_L, spans.row_L, spans.begin_L, spans.end_L, jnp.zeros_like(spans.begin_L)
        spans_6L, span_token_X = _stacked(lines), spans.token_X
    flags = (real_T, REAL), (tiled_T, TILED), (own_T > 0, SHARES)
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return KernelPlan(
        **fields,
        how_T=sum(jnp.where(is_so_T, flag, 0) for is_so_T, flag in flags),
        seen_T2=jnp.stack([first_T, position_T if visible_end_T is None else end_T - 1], axis=-1),
        token_T=token_T,
        row_T=jnp.where(real_T & ~tiled_T, row_T, -1),
        ranges_PT2=ranges_PT2,
        rows_6L=rows_6L,
        spans_6L=spans_6L,
        span_token_X=span_token_X,
    )


def _stacked(lines: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, as a choice: XLA then makes one kernel of it and of what computes the lines."""
    index, stacked = jnp.arange(len(lines))[:, None], jnp.int32(0)
    for i, line in enumerate(lines):
        stacked = jnp.where(index == i, line, stacked)
    return stacked


def parts(begin_T: jax.Array, end_T: jax.Array, num_parts: int) -> jax.Array:
    """Slots [begin, end) of each part of what each token reads, [P, T, 2]. Parts begin at multiples of `MULTIPLE`."""
    begin_PT = begin_T[None] // MULTIPLE * MULTIPLE
    length_T = ceil_div(ceil_div(end_T - begin_PT[0], num_parts), MULTIPLE) * MULTIPLE
    length_T = jnp.maximum(length_T, LEAST_PART_SLOTS) if num_parts > 1 else length_T
    begin_PT = begin_PT + jnp.arange(num_parts)[:, None] * length_T
    end_PT = jnp.minimum(begin_PT + length_T, end_T)
    return jnp.stack([jnp.minimum(jnp.maximum(begin_PT, begin_T), end_PT), end_PT], axis=-1).astype(jnp.int32)
