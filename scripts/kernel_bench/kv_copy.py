"""What a user would call instead of copying KV blocks: indexing, which knows no padding."""

from typing import Any

from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.timing import Chain
from pallas_kernels.workloads import operands_of


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`."""
    return {"pool.at[target].set(pool[source])": lambda: indexed(case)}


def indexed(case: Any) -> Chain:
    pool, source_P, target_P = operands_of("kv_copy", case, "reference")

    def copy(pool, source_P, target_P):
        return tuple(x_B.at[target_P].set(x_B[source_P]) for x_B in pool)

    return Chain(copy, pool, (source_P, target_P))
