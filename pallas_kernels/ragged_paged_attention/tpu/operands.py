"""What both attention kernels read: arrays outside of a kernel, refs inside. Knows no arithmetic.

Letters beside the package's: L lanes, W lanes of a slot.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.ragged_paged_attention.tpu.segments import Segments

UNCHECKED = {"disable_bounds_checks": True, "disable_semaphore_checks": True}
"""Options of Mosaic: no code that halts the core at a copy beyond its array, or a semaphore that does not end at zero.

Such code takes a third of the instructions that fetch a block. That nothing is beyond is known without it: ids of
blocks within a context come from the pool, as the engine on the host says (`core/kv_cache/manager.py`), those beyond it
are not read, and every other index follows from the shapes of a step. The simulator raises where the checks would halt;
the tests of these kernels run in it, with garbage in unused entries of block tables.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Begun:
    """Attention of every query to the spans that its row shares: out and top in the order of q, float32.

    out is weighted values over the sum of weights, top the power of 2 that this sum is, all lanes alike. A query that
    shares nothing has a sink there, or nothing.
    """

    out: Any
    top: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """q: in the kernel's own order. sinks: [K, rows, L], all lanes alike, times log2(e), or None.

    position_YL: where queries stand, all lanes alike, if not as segments say. end_YL: one past the last position that
    they see, likewise, if that is not their own. begun: what some segments begin with.
    tables: pages of the block table. kv_BKSW: the cache. A cache of 8 bits may have head_scales_K2L, of keys and of
    values, all lanes alike, or token_scales_BK2L.
    """

    segments: Segments
    q: Any
    sinks: Any
    position_YL: Any
    end_YL: Any
    begun: Begun | None
    head_scales_K2L: Any
    tables: Any
    kv_BKSW: Any
    token_scales_BK2L: Any

    @property
    def num_scalars(self) -> int:
        """How many of the leaves are fetched into SMEM before the kernel starts."""
        return len(jax.tree.leaves(self.segments))

    def specs(self, block: tuple[int, ...], place: Callable, heads: int) -> list[pl.BlockSpec]:
        """Specs of the leaves after the scalars. The grid goes over groups of kv heads, then blocks of queries: q comes
        in blocks of the shape `block`, which lie at place(h, j)."""
        q_spec = pl.BlockSpec(block, lambda h, j, *_: place(h, j))
        per_head = lambda x: pl.BlockSpec((heads, x.shape[1], NUM_LANES), lambda h, j, *_: (h, 0, 0))
        per_query = lambda x: pl.BlockSpec((block[-2], NUM_LANES), lambda h, j, *_: (j, 0))
        begun = lambda x: pl.BlockSpec((*block[:-1], x.shape[-1]), self._place_of_begun(place))
        in_hbm = lambda x: pl.BlockSpec(memory_space=pltpu.HBM)
        leaves = (
            (lambda x: q_spec, self.q),
            (per_head, self.sinks),
            (per_query, self.position_YL),
            (per_query, self.end_YL),
            (begun, self.begun),
            (per_head, self.head_scales_K2L),
            (in_hbm, self.tables),
            (in_hbm, self.kv_BKSW),
            (in_hbm, self.token_scales_BK2L),
        )
        return [make(x) for make, tree in leaves for x in jax.tree.leaves(tree)]

    def _place_of_begun(self, place: Callable) -> Callable:
        """Blocks of queries in which nothing was begun fetch none: the place stays where it is."""
        return lambda h, j, *scalars: place(h, jnp.where(scalars[self.num_scalars - 1][j] > 0, j, 0))
