"""Double-buffered copies of KV blocks from HBM, driven by a list of segments. Knows no queries and no attention.

A step of a kernel works on up to I items. While step n is computed, the blocks of step n + 1 and the pages of the
block table for steps n + 2 and n + 3 are on their way. Items of one step lie in one grid block of the kernel, so that
their queries and outputs are in VMEM; steps go on from one grid block to the next without a gap.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, round_up
from pallas_kernels.ragged_paged_attention.tpu.plan import TABLE_PAGE
from pallas_kernels.ragged_paged_attention.tpu.segments import Segments
from pallas_kernels.shapes import ceil_div

# what the scratch arrays `cursor`, `counts` and `listed` hold
NEXT_STEP, NEXT_ITEM, NEXT_SEGMENT = range(3)
ITEMS, BLOCKS = range(2)
SEGMENT, PIECE, BEGIN_BLOCK, END_BLOCK = range(4)
LISTED_STEPS = 4
COPIES_AT_ONCE = 16
"""About so many are started by one round of a loop."""


@dataclasses.dataclass(frozen=True)
class FetchShape:
    """What is fetched at once: items in a step, heads, and slots of an item in blocks of `block_size` slots.

    `token_scales`: the scales of a block's tokens come with it.
    """

    num_items: int
    num_heads: int
    item_slots: int
    block_size: int
    slot_lanes: int
    pages_per_row: int
    token_scales: bool

    @property
    def item_blocks(self) -> int:
        return self.item_slots // self.block_size

    def scratch(self, dtype: Any) -> "Scratch":
        """What a kernel allocates for its `Fetcher`."""
        scale_lanes = round_up(self.block_size, NUM_LANES)
        scales_shape = (2, self.num_items, self.item_blocks, self.num_heads, 2, scale_lanes)
        return Scratch(
            scales=pltpu.VMEM(scales_shape, jnp.float32) if self.token_scales else None,
            blocks=pltpu.VMEM((2, self.num_items, self.num_heads, self.item_slots, self.slot_lanes), dtype),
            pages=pltpu.SMEM((2 * self.num_items * TABLE_PAGE,), jnp.int32),
            listed=pltpu.SMEM((LISTED_STEPS, self.num_items, 4), jnp.int32),
            cursor=pltpu.SMEM((3,), jnp.int32),
            counts=pltpu.SMEM((LISTED_STEPS, 2), jnp.int32),
            block_semaphores=pltpu.SemaphoreType.DMA((2,)),
            page_semaphores=pltpu.SemaphoreType.DMA((2,)),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scratch:
    """Memory that stays from step to step."""

    blocks: Any
    scales: Any
    pages: Any
    listed: Any
    cursor: Any
    counts: Any
    block_semaphores: Any
    page_semaphores: Any


@dataclasses.dataclass(frozen=True)
class Item:
    """One item of a step, as scalars. Slots outside of [first, end) were not fetched.

    in_use: whether there is such an item. segment: index of its segment. is_first: of its segment's items.
    position: of slot 0 of the item. first, end: positions that some query of the segment may see.
    """

    in_use: jax.Array
    segment: jax.Array
    is_first: jax.Array
    position: jax.Array
    first: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Fetcher:
    """Refs of one kernel. `head` is the first of the heads to fetch. `operands`: the kernel's own, of which segments,
    tables, kv_BKSW and token_scales_BK2L are used here, see `operands.Operands`."""

    shape: FetchShape
    operands: Any
    head: jax.Array
    scratch: Scratch

    @property
    def segments(self) -> Segments:
        return self.operands.segments

    def begin(self) -> None:
        """Start from the first item: once per pass over all segments."""
        for field in (NEXT_STEP, NEXT_ITEM, NEXT_SEGMENT):
            self.scratch.cursor[field] = 0
        pl.loop(0, 2)(self._list_items)
        self._start_blocks(0)
        self._list_items(2)

    def run_steps(self, grid_block: jax.Array, compute: Any) -> None:
        """Call `compute(step, meanwhile)` for every step of a grid block, when its items lie in `blocks(step)`. It
        calls `meanwhile` once, where scalar work may lie beside its own."""
        item_end_J = self.segments.item_end_J
        first = jnp.where(grid_block == 0, 0, item_end_J[jnp.maximum(grid_block - 1, 0)])
        num_steps = ceil_div(item_end_J[grid_block] - first, self.shape.num_items)
        start = self.scratch.cursor[NEXT_STEP]

        @pl.loop(0, num_steps)
        def _(i):
            step = start + i
            self._start_blocks(step + 1)
            self._await_blocks(step)
            compute(step, lambda: self._list_items(step + 3))

        self.scratch.cursor[NEXT_STEP] = start + num_steps

    def blocks(self, step: jax.Array) -> Any:
        """Ref [items, heads, slots, lanes] of what was fetched for `step`."""
        return self.scratch.blocks.at[step & 1]

    def token_scales(self, step: jax.Array) -> Any:
        """Ref [items, blocks, heads, 2, lanes] of the scales of keys and values fetched for `step`, if any."""
        return None if self.scratch.scales is None else self.scratch.scales.at[step & 1]

    def item(self, step: jax.Array, i: Any) -> Item:
        """Item `i` of a step that was listed."""
        segments, listed = self.segments, self.scratch.listed.at[step & (LISTED_STEPS - 1), i]
        segment, piece = listed[SEGMENT], listed[PIECE]
        in_use = segment >= 0
        z = jnp.maximum(segment, 0)
        position = piece * self.shape.item_slots
        first, end = segments.begin_Z[z], segments.end_Z[z]
        return Item(in_use, z, first >= position, position, first, end)

    def _list_items(self, step: Any) -> None:
        """Note the items of a step, and start to fetch the page of the block table that each needs."""
        segments, cursor = self.segments, self.scratch.cursor
        first_item, first_segment = cursor[NEXT_ITEM], cursor[NEXT_SEGMENT]
        in_range = first_segment < segments.row_Z.shape[0]
        in_range &= first_item < segments.item_end_J[segments.item_end_J.shape[0] - 1]
        stop = segments.stop_Z[jnp.where(in_range, first_segment, 0)]
        num_used = jnp.where(in_range, jnp.clip(stop - first_item, 0, self.shape.num_items), 0)

        segment, num_blocks, items = first_segment, jnp.int32(0), []
        for i in range(self.shape.num_items):
            in_use = i < num_used
            z = jnp.where(in_use, segment, 0)
            piece = first_item + i + segments.base_Z[z]
            begin, end = self._needed_blocks(piece * self.shape.item_slots, segments.begin_Z[z], segments.end_Z[z])
            end = jnp.where(in_use, jnp.maximum(begin, end), begin)
            page = segments.row_Z[z] * self.shape.pages_per_row + _quotient(piece * self.shape.item_blocks, TABLE_PAGE)
            items.append((jnp.where(in_use, segment, -1), piece, begin, end, page))
            ends = in_use & (first_item + i + 1 == segments.item_end_Z[z])
            segment, num_blocks = segment + ends.astype(jnp.int32), num_blocks + end - begin
        for i, (*listed, page) in enumerate(items):  # only now, since nothing is read beside what is written
            for field, x in zip((SEGMENT, PIECE, BEGIN_BLOCK, END_BLOCK), listed):
                self.scratch.listed[step & (LISTED_STEPS - 1), i, field] = x
            pl.when(i < num_used)(self._page_copy(step, i, page).start)
        counts = self.scratch.counts.at[step & (LISTED_STEPS - 1)]
        counts[ITEMS], counts[BLOCKS] = num_used, num_blocks
        cursor[NEXT_SEGMENT], cursor[NEXT_ITEM] = segment, first_item + num_used

    def _start_blocks(self, step: Any) -> None:
        # A semaphore counts bytes of any copy: all pages must be there before one is read.
        self._await_pages(step)
        items_at_once = math.gcd(self.shape.num_items, max(1, COPIES_AT_ONCE // self.shape.item_blocks))

        @pl.loop(0, self.shape.num_items // items_at_once)
        def _(n):
            for k in range(items_at_once):
                self._start_item(step, n * items_at_once + k)

    def _start_item(self, step: Any, i: Any) -> None:
        listed = self.scratch.listed.at[step & (LISTED_STEPS - 1), i]
        begin, end = listed[BEGIN_BLOCK], listed[END_BLOCK]
        entry = self._page_slots(step, i) + (listed[PIECE] * self.shape.item_blocks & (TABLE_PAGE - 1))
        semaphore = self.scratch.block_semaphores.at[step & 1]
        heads, size = pl.ds(self.head, self.shape.num_heads), self.shape.block_size

        def start(block_id: Any, j: Any, target_ref: Any) -> None:
            pltpu.make_async_copy(self.operands.kv_BKSW.at[block_id, heads], target_ref, semaphore).start()
            if self.shape.token_scales:
                source_ref, scales_ref = self.operands.token_scales_BK2L, self.scratch.scales.at[step & 1, i, j]
                pltpu.make_async_copy(source_ref.at[block_id, heads], scales_ref, semaphore).start()

        at_once = min(COPIES_AT_ONCE, self.shape.item_blocks)

        def start_some(each_is_needed: bool, n: Any) -> None:
            slots = pl.ds(pl.multiple_of(n * at_once * size, size), at_once * size)
            some_ref = self.blocks(step).at[i, :, slots]
            for k in range(at_once):
                j = n * at_once + k
                target_ref = some_ref.at[:, pl.ds(k * size, size)]
                block_id = self.scratch.pages[entry + j]  # anything where the block is not needed
                is_needed = each_is_needed or (begin <= j) & (j < end)
                pl.when(is_needed)(functools.partial(start, block_id, j, target_ref))

        rounds = self.shape.item_blocks // at_once
        is_whole = end - begin == self.shape.item_blocks
        if at_once < COPIES_AT_ONCE:  # a branch costs more than to ask for each of a few blocks
            pl.loop(0, rounds)(functools.partial(start_some, False))
        else:
            pl.when(is_whole)(lambda: pl.loop(0, rounds)(functools.partial(start_some, True)))
            pl.when(jnp.logical_not(is_whole))(lambda: pl.loop(0, rounds)(functools.partial(start_some, False)))

    def _await_pages(self, step: Any) -> None:
        pages, size = self.scratch.pages, TABLE_PAGE
        semaphore = self.scratch.page_semaphores.at[step & 1]
        num_used = self.scratch.counts[step & (LISTED_STEPS - 1), ITEMS]
        _await_parts(num_used, self.shape.num_items, lambda n: [pages.at[pl.ds(0, n * size)]], semaphore)

    def _await_blocks(self, step: jax.Array) -> None:
        """Wait for the bytes of all copies of a step at once, whichever blocks they belong to."""
        shape, semaphore = self.shape, self.scratch.block_semaphores.at[step & 1]
        num_blocks = self.scratch.counts[step & (LISTED_STEPS - 1), BLOCKS]
        _await_parts(num_blocks, shape.num_items * shape.item_blocks, self._as_large_as, semaphore)

    def _as_large_as(self, num_blocks: int) -> list[Any]:
        """Refs of as many bytes as so many blocks: a part of an item, or whole items."""
        shape, scratch = self.shape, self.scratch
        num_items, rest = divmod(num_blocks, shape.item_blocks)
        items, slots, blocks = pl.ds(0, num_items), slice(None), slice(None)
        if num_items == 0:
            items, slots, blocks = 0, pl.ds(0, rest * shape.block_size), pl.ds(0, rest)
        refs = [scratch.blocks.at[0, items, ..., slots, slice(None)]]
        return refs if scratch.scales is None else [*refs, scratch.scales.at[0, items, blocks]]

    def _needed_blocks(self, position: Any, first: Any, end: Any) -> tuple[jax.Array, jax.Array]:
        """Which blocks of the item at a position hold something that some query may see."""
        first = jnp.maximum(first - position, 0)
        last = jnp.minimum(end - position, self.shape.item_slots) - 1
        return _quotient(first, self.shape.block_size), _quotient(last, self.shape.block_size) + 1

    def _page_slots(self, step: Any, i: Any) -> Any:
        """Where the page of the block table of an item begins."""
        return pl.multiple_of(((step & 1) * self.shape.num_items + i) * TABLE_PAGE, TABLE_PAGE)

    def _page_copy(self, step: Any, i: Any, page: Any) -> Any:
        target = self.scratch.pages.at[pl.ds(self._page_slots(step, i), TABLE_PAGE)]
        return pltpu.make_async_copy(
            self.operands.tables.at[page, 0], target, self.scratch.page_semaphores.at[step & 1]
        )


def _await_parts(count: Any, most: int, refs_of: Any, semaphore: Any) -> None:
    """Wait for as many bytes as `count` of at most `most` parts have, of which refs_of(n) are n."""

    def wait(n: int) -> None:
        for ref in refs_of(n):
            pltpu.make_async_copy(ref, ref, semaphore).wait()

    pl.when(count == most)(lambda: wait(most))

    @pl.when(count < most)
    def _():
        for bit in range((most - 1).bit_length()):
            pl.when(count & 1 << bit > 0)(functools.partial(wait, 1 << bit))


def _quotient(x: Any, divisor: int) -> Any:
    """Of numbers that are not negative, or that need not be right: a shift where it can be."""
    return x >> divisor.bit_length() - 1 if divisor & (divisor - 1) == 0 else lax.div(x, divisor)
