"""What the HTTP server asks of an engine. `AsyncLLM` gives it; tests put an engine without a model in its place."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from jaxpaged.config import EngineConfig
from jaxpaged.engine.control import AsyncEngineControl
from jaxpaged.engine.input.processor import InputProcessor, Prompt
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.engine.output.stream import Taker
from jaxpaged.messages import LoRAInfo, LoRARequest, RequestOutput
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.sampling_params import SamplingParams


class Engine(AsyncEngineControl, Protocol):
    """An engine that serves many requests at a time on one event loop."""

    config: EngineConfig
    input_processor: InputProcessor

    @property
    def is_alive(self) -> bool:
        """Whether it serves, or will again by itself."""
        ...

    def obstacle(self, when_compiled: bool = True) -> str | None:
        """Why an ordinary request that came now would not be served at full speed; None when it would.

        `when_compiled` False: that it may have to wait for programs to be compiled is no obstacle.
        """
        ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
        trace_headers: Mapping[str, str] | None = None,
        take: Taker | None = None,
        group: str | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | LoRAInfo | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Results of one prompt as they come, but those that `take` takes while the generator waits for them. Closing
        the generator, or cancelling who reads it, aborts the request. `data_parallel_rank`: the engine core for it.

        Raises RequestError for a bad request, EngineError when the engine fails it, and EngineDeadError once it has
        stopped.
        """
        ...

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        group: str | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | LoRAInfo | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """The one result of a prompt, with the behaviour of `generate`."""
        ...

    def suitable_core(
        self, token_ids: Sequence[int], cache_salt: str | None = None, lora: LoRAInfo | None = None
    ) -> int:
        """The `data_parallel_rank` that suits a prompt best now."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop requests; whoever reads them gets finish reason "abort". Unknown ids pass."""
        ...

    @property
    def sleep_level(self) -> int | None:
        """How deep the engine sleeps, as far as is known here; None while it is awake. It asks nobody."""
        ...

    def get_metrics(self) -> list[Metric]: ...

    def shutdown(self) -> None:
        """Release the devices. Requests under way are lost."""
        ...
