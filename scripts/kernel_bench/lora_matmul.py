"""What a user would call instead of our product of adapters: all slots as two products of XLA, with masks."""

from typing import Any

from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.workloads import chain_of

OP = "lora_matmul"


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`."""
    return {"all slots in XLA": lambda: chain_of(OP, case, "reference")}
