"""LLM inference native to JAX and XLA. These names are the public interface; nothing else is.

They are imported when they are first used, so that `jaxpaged --help` need not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.entrypoints.llm import LLM
    from jaxpaged.messages import RequestOutput
    from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
    from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "EngineConfig", "PoolingParams", "PoolingRequestOutput", "RequestOutput",
    "SamplingParams",
]  # fmt: skip

_MODULES = {
    "LLM": "jaxpaged.entrypoints.llm",
    "AsyncLLM": "jaxpaged.engine.async_llm",
    "BeamSearchParams": "jaxpaged.sampling_params",
    "EngineConfig": "jaxpaged.config",
    "PoolingParams": "jaxpaged.pooling",
    "PoolingRequestOutput": "jaxpaged.pooling",
    "RequestOutput": "jaxpaged.messages",
    "SamplingParams": "jaxpaged.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)
