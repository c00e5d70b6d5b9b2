"""What all endpoints share: the engine, the model as clients know it, the options, and what is under way."""

import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged import __version__
from jaxpaged.config import EngineConfig
from jaxpaged.engine.early_leases import let_go
from jaxpaged.engine.observability.metrics import Metric
from jaxpaged.entrypoints.http.engine_client import Engine
from jaxpaged.entrypoints.http.generation.conversation import answer_formats
from jaxpaged.entrypoints.http.generation.grammar_desk import Asker, GrammarDesk
from jaxpaged.entrypoints.http.generation.pace import Pace
from jaxpaged.entrypoints.http.generation.prompts import PromptReader
from jaxpaged.entrypoints.http.generation.traffic import Traffic
from jaxpaged.entrypoints.http.options import ServerOptions
from jaxpaged.entrypoints.http.transport.request_counts import RequestCounts
from jaxpaged.entrypoints.http.transport.sse import EventStream, Pieces, answer_or_leave
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.errors import ErrorKind, ServingError

COUNTED_CONTEXTS = 8
"""Texts whose tokens are only counted may be longer than the model takes, so many times."""
SYSTEM_FINGERPRINT = f"jaxpaged-{__version__}"


@dataclass(frozen=True)
class ServedModel:
    """The model as clients know it. The first of `names` is its own; `aliases` are accepted but not shown."""

    names: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    aliases: tuple[str, ...] = ()
    cache_labels: dict[str, str] = field(default_factory=dict)  # of the metric vllm:cache_config_info
    created: int = field(default_factory=lambda: int(time.time()))


def served_model(config: EngineConfig, names: tuple[str, ...] | None) -> ServedModel:
    """The model of a resolved configuration. One that lies in a folder is called like the folder, not by its path."""
    given = config.model.model
    cache = config.cache
    return ServedModel(
        names=names or (re.split(r"[/\\]", given.rstrip("/\\"))[-1] if is_path(given) else given,),
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        aliases=() if names else (given,),
        cache_labels={
            "block_size": str(cache.block_size),
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "num_gpu_blocks": str(cache.num_gpu_blocks_override),
        },
    )


def is_path(model: str) -> bool:
    """Whether a model's name is a folder's path; hub ids have one slash inside."""
    return model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model


class Service:
    """The shared parts, and the checks that every generating endpoint makes.

    Raises ConfigError when an option does not fit the model.
    """

    def __init__(self, engine: Engine, model: ServedModel, options: ServerOptions):
        self.engine = engine
        self.model = model
        self.options = options
        self.prompts = PromptReader(engine.input_processor, options.default_chat_template_kwargs)
        self.formats = answer_formats(options, engine.input_processor.chat_templates)
        self.most_counted = COUNTED_CONTEXTS * model.max_model_len
        self.pace = Pace()
        self._grammars = GrammarDesk(engine.input_processor.grammar_checker)
        self.requests = RequestCounts()
        self.has_been_ready = False  # at some time since the start
        self.sources: list[Callable[[], list[Metric]]] = [self.requests.read]  # of metrics, besides the engine
        self.traffic = Traffic(
            model.max_num_seqs,
            options.max_num_queued_reqs,
            options.max_num_queued_tokens,
            max_sequences=options.max_sequences_per_request,
            max_answer_bytes=options.max_answer_bytes,
        )

    @property
    def is_tracing(self) -> bool:
        """Whether requests are traced: only then does the engine take trace headers."""
        return self.engine.config.observability.otlp_traces_endpoint is not None

    async def let_go(self, kv_transfer_params: Any) -> None:
        """A request with these is refused, or given up: what another engine lends for it is given back."""
        if kv_transfer_params:
            await let_go(self.engine.call, kv_transfer_params)

    async def check_shape(self, shape: StructuredOutputsParams | None, asker: Asker) -> None:
        """Wait until it is known whether a shape can be used, in the turns of who asks. Raises RequestError if not."""
        await self._grammars.check(shape, asker)

    def close(self) -> None:
        """End the threads."""
        self._grammars.close()

    def count_tokens(self, text: str) -> int:
        """Tokens of a text that stands alone."""
        return len(self.engine.input_processor.tokenizer.encode(text, False)) if text else 0

    def check_model(self, name: str | None) -> str:
        """The name under which the answer goes out. Raises ServingError for another model's name."""
        if not name:
            return self.model.names[0]
        if name in self.model.names:
            return name
        if name in self.model.aliases:
            return self.model.names[0]
        known = ", ".join(repr(each) for each in self.model.names)
        raise ServingError(
            f"The model {name!r} does not exist. This server has {known}.", "model", kind=ErrorKind.NOT_FOUND
        )

    async def answered(self, request: Request, request_id: str, work: Coroutine[Any, Any, Response]) -> Response:
        """What `work` answers, unless the client leaves before: then it is cancelled."""
        response = await answer_or_leave(request, work)
        response.headers.update(self.answer_headers(request_id))
        return response

    def streamed(self, request_id: str, pieces: Pieces, late_error: Callable[[ServingError], bytes]) -> Response:
        """The pieces as they are made; `late_error` makes the one for a failure after the first."""
        headers = self.answer_headers(request_id)
        return EventStream(pieces, late_error, self.options.sse_keep_alive_interval, headers)

    def answer_headers(self, request_id: str) -> dict[str, str]:
        if not self.options.enable_request_id_headers:
            return {}
        return {"X-Request-Id": request_id.partition("-")[2]}
