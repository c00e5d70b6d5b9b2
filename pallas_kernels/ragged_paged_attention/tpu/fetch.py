"""Double-buffered copies of KV blocks from HBM, driven by a list of segments. Knows no queries and no attention.

A step of a kernel works on up to I items. While step n is computed, the blocks of step n + 1 and the pages of the
block table for step n + 2 are on their way. Items of one step lie in one grid block of the kernel, so that their
queries and outputs are in VMEM; steps go on from one grid block to the next without a gap.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES, round_up
from pallas_kernels.ragged_paged_attention.tpu.operands import Operands
from pallas_kernels.ragged_paged_attention.tpu.plan import TABLE_PAGE
from pallas_kernels.ragged_paged_attention.tpu.segments import Segments
from pallas_kernels.shapes import ceil_div

# what the scratch arrays `cursor` and `listed` hold
NEXT_STEP, NEXT_ITEM, NEXT_SEGMENT = range(3)
SEGMENT, PIECE = range(2)
LISTED_STEPS = 4


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
            pages=pltpu.SMEM((2, self.num_items, 1, TABLE_PAGE), jnp.int32),
            listed=pltpu.SMEM((LISTED_STEPS, self.num_items, 2), jnp.int32),
            cursor=pltpu.SMEM((3,), jnp.int32),
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
    block_semaphores: Any
    page_semaphores: Any


@dataclasses.dataclass(frozen=True)
class Item:
    """One item of a step, as scalars. Slots outside of [first, end) were not fetched.

    in_use: whether there is such an item. segment: index of its segment. is_first, is_last: of its segment's items.
    position: of slot 0 of the item. first, end: positions that some query of the segment may see.
    """

    in_use: jax.Array
    segment: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    position: jax.Array
    first: jax.Array
    end: jax.Array


@dataclasses.dataclass(frozen=True)
class Fetcher:
    """Refs of one kernel. `head` is the first of the heads to fetch."""

    shape: FetchShape
    operands: Operands
    head: jax.Array
    scratch: Scratch

    @property
    def segments(self) -> Segments:
        return self.operands.segments

    def begin(self) -> None:
        """Start from the first item: once per pass over all segments."""
        for field in (NEXT_STEP, NEXT_ITEM, NEXT_SEGMENT):
            self.scratch.cursor[field] = 0
        self._list_items(0)
        self._list_items(1)
        self._start_blocks(0)

    def run_steps(self, grid_block: jax.Array, compute: Any) -> None:
        """Call `compute(step)` for every step of a grid block, when its items lie in `blocks(step)`."""
        item_end_J = self.segments.item_end_J
        first = jnp.where(grid_block == 0, 0, item_end_J[jnp.maximum(grid_block - 1, 0)])
        num_steps = ceil_div(item_end_J[grid_block] - first, self.shape.num_items)
        start = self.scratch.cursor[NEXT_STEP]

        @pl.loop(0, num_steps)
        def _(i):
            step = start + i
            self._start_blocks(step + 1)
            self._list_items(step + 2)
            self._await_blocks(step)
            compute(step)

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
        last_piece = segments.item_end_Z[z] - 1 + segments.base_Z[z]
        position = piece * self.shape.item_slots
        first, end = segments.begin_Z[z], segments.end_Z[z]
        return Item(in_use, z, first >= position, piece == last_piece, position, first, end)

    def _list_items(self, step: Any) -> None:
        """Note the items of a step, and start to fetch the page of the block table that each needs."""
        segments, cursor = self.segments, self.scratch.cursor
        first_item, first_segment = cursor[NEXT_ITEM], cursor[NEXT_SEGMENT]
        in_range = first_segment < segments.row_Z.shape[0]
        in_range &= first_item < segments.item_end_J[segments.item_end_J.shape[0] - 1]
        stop = segments.stop_Z[jnp.where(in_range, first_segment, 0)]

        def list_item(i, segment):
            item = first_item + i
            in_use = in_range & (item < stop)
            z = jnp.where(in_use, segment, 0)
            piece = item + segments.base_Z[z]
            listed = self.scratch.listed.at[step & (LISTED_STEPS - 1), i]
            listed[SEGMENT] = jnp.where(in_use, segment, -1)
            listed[PIECE] = piece

            @pl.when(in_use)
            def _():
                page = lax.div(piece * self.shape.item_blocks, TABLE_PAGE)
                self._page_copy(step, i, segments.row_Z[z] * self.shape.pages_per_row + page).start()

            return segment + (in_use & (item + 1 == segments.item_end_Z[z])).astype(jnp.int32)

        cursor[NEXT_SEGMENT] = lax.fori_loop(0, self.shape.num_items, list_item, first_segment)
        cursor[NEXT_ITEM] = jnp.where(in_range, jnp.minimum(first_item + self.shape.num_items, stop), first_item)

    def _start_blocks(self, step: Any) -> None:
        # A semaphore counts bytes of any copy: all pages must be there before one is read.
        @pl.loop(0, self.shape.num_items)
        def _(i):
            pl.when(self.item(step, i).in_use)(lambda: self._page_copy(step, i, 0).wait())

        @pl.loop(0, self.shape.num_items)
        def _(i):
            item = self.item(step, i)

            @pl.when(item.in_use)
            def _():
                first_entry = lax.rem(lax.div(item.position, self.shape.block_size), TABLE_PAGE)

                @pl.loop(*self._needed_blocks(item))
                def _(j):
                    block_id = self.scratch.pages[step & 1, i, 0, first_entry + j]
                    for copy in self._block_copies(step, i, j, block_id):
                        copy.start()

    def _await_blocks(self, step: jax.Array) -> None:
        @pl.loop(0, self.shape.num_items)
        def _(i):
            item = self.item(step, i)

            @pl.when(item.in_use)
            def _():
                @pl.loop(*self._needed_blocks(item))
                def _(j):
                    for copy in self._block_copies(step, i, j, 0):
                        copy.wait()

    def _needed_blocks(self, item: Item) -> tuple[jax.Array, jax.Array]:
        """Which blocks of an item hold something that some query may see."""
        first = jnp.maximum(item.first - item.position, 0)
        last = jnp.minimum(item.end - item.position, self.shape.item_slots) - 1
        return lax.div(first, self.shape.block_size), lax.div(last, self.shape.block_size) + 1

    def _page_copy(self, step: Any, i: Any, page: Any) -> Any:
        return pltpu.make_async_copy(
            self.operands.tables.at[page], self.scratch.pages.at[step & 1, i], self.scratch.page_semaphores.at[step & 1]
        )

    def _block_copies(self, step: Any, i: Any, j: Any, block_id: Any) -> list[Any]:
        heads = pl.ds(self.head, self.shape.num_heads)
        slots = pl.ds(pl.multiple_of(j * self.shape.block_size, self.shape.block_size), self.shape.block_size)
        semaphore = self.scratch.block_semaphores.at[step & 1]
        pairs = [(self.operands.kv_BKSW.at[block_id, heads], self.scratch.blocks.at[step & 1, i, :, slots])]
        if self.shape.token_scales:
            scales_ref = self.scratch.scales.at[step & 1, i, j]
            pairs.append((self.operands.token_scales_BK2L.at[block_id, heads], scales_ref))
        return [pltpu.make_async_copy(source, target, semaphore) for source, target in pairs]
