"""What an entry of each seam must be able to do, where no other package says it.

A tool parser is a `parsing.parser.ToolFormat`, a reasoning parser a `parsing.reasoning.ReasoningFormat` or what has its
methods, and a LoRA resolver a `serving.adapter_resolvers.LoRAResolver`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.observability.metrics_types import Metric
    from jaxpaged.pooling import PoolingRequestOutput


class StatLogger(Protocol):
    """Tells of the engine what /metrics tells. Called in a thread of its own, so it may take its time."""

    def __init__(self, config: "EngineConfig", engine_index: int = 0): ...

    def log(self, metrics: "Sequence[Metric]") -> None:
        """All metrics as they are now, every ten seconds while the engine is busy, and once when it is no more. After
        one that raises, the next still comes; a snapshot is left out while the one before is not done."""
        ...


class EndpointPlugin(Protocol):
    """Adds HTTP endpoints to the public listener."""

    def __call__(self, engine: Any) -> "Sequence[Any]":
        """Each a `jaxpaged.entrypoints.http.endpoint.Endpoint`, of a path that is not taken. `engine` is the server's
        `AsyncLLM`. The server's API keys guard them, too. A handler that is no coroutine runs in a thread; a coroutine
        shares the loop with all requests and must not block it."""
        ...


class IOProcessor(Protocol):
    """Lets a model that pools take data of a kind of its own, and answer in a form of its own.

    Every call runs in a thread of its own. It may also have `merge_pooling_params(params)`, which returns the
    `PoolingParams` of the prompts, given those of the request.
    """

    def parse_data(self, data: Any) -> Any:
        """What a client sent, checked. ValueError, TypeError and RequestError refuse the request, and the client reads
        their text. `parse_request` is vLLM's older name of it."""
        ...

    def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        """The prompt that this means, a text or token ids, or a list of prompts."""
        ...

    def post_process(self, model_output: "Sequence[PoolingRequestOutput]", request_id: str | None = None) -> Any:
        """The answer, of the results of all prompts in order; where it goes out by HTTP, what JSON can say."""
        ...
