"""LLM inference native to JAX and XLA. These names are the public interface; nothing else is.

They are imported when they are first used, so that `jaxpaged --help` need not wait for jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import did_you_mean

if TYPE_CHECKING:
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from jaxpaged.engine.input.prompts import Prompt as PromptType
    from jaxpaged.engine.input.prompts import TextPrompt, TokensPrompt
    from jaxpaged.engine.llm_engine import LLMEngine
    from jaxpaged.engine.observability.logprob_difference import LogprobDifference, logprob_difference
    from jaxpaged.engine.observability.metrics import Counter, Gauge, Histogram, Metric
    from jaxpaged.entrypoints.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from jaxpaged.entrypoints.llm import LLM
    from jaxpaged.messages import CompletionOutput, Logprob, LoRARequest, RequestOutput
    from jaxpaged.params.offered import WeightOffer
    from jaxpaged.plugins import Plugin, register_model
    from jaxpaged.pooling import (
        ClassificationOutput,
        EmbeddingOutput,
        PoolingOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringOutput,
    )
    from jaxpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
    from jaxpaged.serving.beam_search import BeamSearchOutput, BeamSearchSequence

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "Gauge",
    "Histogram",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "LogprobDifference",
    "Metric",
    "Plugin",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "WeightOffer",
    "logprob_difference",
    "register_model",
]

_NAMES_OF = {
    "engine.async_llm": ["AsyncLLM"],
    "engine.llm_engine": ["LLMEngine"],
    "engine.observability.logprob_difference": ["LogprobDifference", "logprob_difference"],
    "engine.observability.metrics": ["Counter", "Gauge", "Histogram", "Metric"],
    "engine.input.prompts": ["TextPrompt", "TokensPrompt"],
    "serving.beam_search": ["BeamSearchOutput", "BeamSearchSequence"],
    "entrypoints.engine_args": ["AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"],
    "entrypoints.llm": ["LLM"],
    "messages": ["CompletionOutput", "Logprob", "LoRARequest", "RequestOutput"],
    "params.offered": ["WeightOffer"],
    "plugins": ["Plugin", "register_model"],
    "pooling": [
        "ClassificationOutput",
        "EmbeddingOutput",
        "PoolingOutput",
        "PoolingParams",
        "PoolingRequestOutput",
        "ScoringOutput",
    ],
    "sampling_params": ["BeamSearchParams", "RequestOutputKind", "SamplingParams"],
    "sampling_params.structured_outputs": ["StructuredOutputsParams"],
}
_PLACES = {name: (module, name) for module, names in _NAMES_OF.items() for name in names} | {
    "AsyncLLMEngine": ("engine.async_llm", "AsyncLLM"),
    "PromptType": ("engine.input.prompts", "Prompt"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        near = did_you_mean(name, __all__)
        raise AttributeError(f"module 'jaxpaged' has no attribute {name!r}.{near} It has {', '.join(__all__)}.")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(f"jaxpaged.{module}"), attribute)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
