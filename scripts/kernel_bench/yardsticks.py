"""What yardsticks are, and how PyTorch's are timed. Knows no op."""

import time
from collections.abc import Callable
from typing import Any

from pallas_kernels.timing import Chain, seconds_per_call

Measurable = Chain | Callable[[], float] | None
"""Calls to time, or what gives the seconds of one; None for what cannot do the case."""
Yardsticks = dict[str, Callable[[], Measurable]]
"""What could be called instead of one case of an op, by name; arrays are made when it is called."""

TORCH_RUNS, TORCH_CALLS = 5, 20


def seconds_of(measurable: Chain | Callable[[], float], target_s: float) -> float:
    """The seconds of a call; runs take about `target_s` where we have a say."""
    return seconds_per_call(measurable, target_s) if isinstance(measurable, Chain) else measurable()


def installed_torch() -> Any:
    """PyTorch with a GPU, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def torch_seconds(torch: Any, call: Callable[[], Any]) -> float:
    """The best of several runs of many calls, after one that compiles."""
    call()
    best = float("inf")
    for _ in range(TORCH_RUNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TORCH_CALLS):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / TORCH_CALLS)
    return best
