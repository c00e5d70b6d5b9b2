"""The TPU backend before it is used: its refusals need no import of Pallas for TPUs, which takes 0.2 s of a start."""

import functools
from typing import Any


class DeferredTpuBackend:
    """Stands for a `TpuBackend`, whose module is imported when one of its other attributes is asked for."""

    def __init__(self, interpret: bool = False):
        self._interpret = interpret

    def why_not(self, platform: str) -> str | None:
        if self._interpret or platform == "tpu":
            return None
        return "it needs a TPU; 'tpu-interpret' runs the same kernels in JAX's simulator of one, for tests"

    def __getattr__(self, name: str) -> Any:
        return getattr(_tpu_backend(self._interpret), name)


@functools.cache
def _tpu_backend(interpret: bool) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    from pallas_kernels.ragged_paged_attention.tpu import TpuBackend

    return TpuBackend(pltpu.InterpretParams(dma_execution_mode="eager") if interpret else None)
