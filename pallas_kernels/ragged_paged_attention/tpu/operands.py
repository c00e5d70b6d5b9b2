"""What both attention kernels read: arrays outside of a kernel, refs inside. Knows no arithmetic.

Letters beside the package's: L lanes, W lanes of a slot.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.lanes import NUM_LANES
from pallas_kernels.ragged_paged_attention.tpu.plan import Segments

UNCHECKED = {"disable_bounds_checks": True, "disable_semaphore_checks": True}
"""Options of Mosaic: no code that halts the core at a copy beyond its array, or a semaphore that does not end at zero.

Such code takes a third of the instructions that fetch a block. That nothing is beyond is known without it: ids of
blocks within a context come from the pool, as the engine's books on the host say (`core/integrity.py`), those beyond it
are not read, and every other index follows from the shapes of a step. The simulator raises where the checks would halt;
the tests of these kernels run in it, with garbage in unused entries of block tables.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """q: in the kernel's own order. sinks: [K, rows, L], all lanes alike, times log2(e), or None.

    tables: pages of the block table. kv_BKSW: the cache. A cache of 8 bits may have head_scales_K2L, of keys and of
    values, all lanes alike, or token_scales_BK2L.
    """

    segments: Segments
    q: Any
    sinks: Any
    head_scales_K2L: Any
    tables: Any
    kv_BKSW: Any
    token_scales_BK2L: Any

    @property
    def num_scalars(self) -> int:
        """How many of the leaves are fetched into SMEM before the kernel starts."""
        return len(jax.tree.leaves(self.segments))

    def specs(self, q_spec: pl.BlockSpec, heads: int) -> list[pl.BlockSpec]:
        """Specs of the leaves after the scalars, for a grid whose first axis goes over groups of kv heads."""
        per_head = lambda x: pl.BlockSpec((heads, x.shape[1], NUM_LANES), lambda h, j, *_: (h, 0, 0))
        in_hbm = lambda x: pl.BlockSpec(memory_space=pltpu.HBM)
        makers = (lambda x: q_spec, per_head, per_head, in_hbm, in_hbm, in_hbm)
        leaves = (self.q, self.sinks, self.head_scales_K2L, self.tables, self.kv_BKSW, self.token_scales_BK2L)
        return [make(x) for make, x in zip(makers, leaves) if x is not None]
