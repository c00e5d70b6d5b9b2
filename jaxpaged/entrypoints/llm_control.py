"""`LLM`'s methods around the engine: what it does and did, its sleep, its recordings, its end.

This module knows no prompts.
"""

from typing import TYPE_CHECKING, Any, Self

from jaxpaged.engine.control import EngineControl
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.tools.pictures.block_map import BlockMap
    from jaxpaged.tools.pictures.engine_stats import EngineStats
    from jaxpaged.tools.pictures.timeline import Timeline


class ControlMethods(EngineControl):
    """What `LLM` offers beside answers."""

    llm_engine: LLMEngine

    def call[R](self, call: CoreCall[R]) -> R:
        """The answer of the engine's core."""
        return self.llm_engine.call(call)

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it: `apply_chat_template`, `encode`, `decode`, a call, `len`, ...

        It is a copy: changing it changes nothing in the engine. The first call imports transformers, which takes a
        second or two. Raises UsageError for an engine without tokenizer.
        """
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without `sampling_params`: the model's own defaults."""
        return self.llm_engine.input_processor.defaults.sampling_params()

    def get_metrics(self) -> list[Metric]:
        return self.llm_engine.get_metrics()

    def timeline(self) -> "Timeline":
        """Where the time of the last steps went. It shows itself in notebooks, and `save(path)` draws it."""
        from jaxpaged.tools.pictures.timeline import Timeline

        return Timeline(*self.step_records(), self.executor_stats().get("token_buckets", ()))

    def blocks(self) -> "BlockMap":
        """Who holds which KV block now. It shows itself in notebooks, prints as text, and `save(path)` draws it."""
        from jaxpaged.tools.pictures.block_map import BlockMap

        return BlockMap(self.block_map())

    def stats(self) -> "EngineStats":
        """What the engine did so far, in a few lines for people; `get_metrics` is for programs."""
        from jaxpaged.tools.pictures.engine_stats import EngineStats

        return EngineStats(self.get_metrics(), self.executor_stats())

    def shutdown(self) -> None:
        """Release the devices."""
        self.llm_engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
