"""`GET /engine/info` and `/engine/state`: what the page shows of the engine.

The engine is asked only while somebody watches, once for all who do, and never more often than costs it half a percent
of its time.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged import __version__
from jaxpaged.entrypoints.http.endpoint import Endpoint, Query
from jaxpaged.entrypoints.http.page.state import (
    EngineInfo,
    EngineState,
    Labels,
    ShownStep,
    numbers_of,
    shown_blocks,
    shown_encoder,
    shown_requests,
    shown_steps,
)
from jaxpaged.errors import EngineError
from jaxpaged.messages import EngineSnapshot, StepRecord
from jaxpaged.serving.service import Service

logger = logging.getLogger(__name__)

INTERVAL = 0.5
"""Seconds between two looks at the engine, at least."""
SHARE = 0.005
"""Of the time of the core, and of that of the server, which watching may cost."""
ANSWER_SECONDS = 0.0005
"""What a response costs the server besides its making, about."""
PATIENCE = 2.0
"""Seconds that a response waits for the engine; a step that waits for a program may take longer."""
MOST_STEPS = 256
MOST_MINE = 16
"""Requests that a page may ask about by their ids."""
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
INFO, STATE = "/engine/info", "/engine/state"
PATHS = (INFO, STATE)


class Live:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service
        self._labels = Labels()
        self._steps: deque[ShownStep] = deque(maxlen=MOST_STEPS)
        self._last_record: StepRecord | None = None
        self._num_steps = 0  # that the engine had finished when it was last asked
        self._encoder = msgspec.json.Encoder()
        self._state = EngineState(time=0.0, wait=INTERVAL, obstacle=None)
        self._encoded = b""
        self._answered = 0  # times that this state was told
        self._due = 0.0
        self._look: asyncio.Task[None] | None = None
        self._look_began = 0.0

    def endpoints(self) -> list[Endpoint]:
        ids = (Query("mine", {"type": "array", "items": {"type": "string"}, "maxItems": MOST_MINE}),)
        return [
            Endpoint("GET", INFO, self.info, response=EngineInfo),
            Endpoint("GET", STATE, self.state, response=EngineState, query=ids),
        ]

    async def info(self, request: Request) -> Response:
        """What the page must know of the server before it asks anything."""
        service, processor = self._service, self._service.engine.input_processor
        pictures = processor.pictures
        parallel = service.engine.config.parallel
        info = EngineInfo(
            version=__version__,
            models=list(service.model.names),
            max_model_len=service.model.max_model_len,
            max_num_seqs=service.model.max_num_seqs,
            max_logprobs=processor.max_logprobs,
            tensor_parallel_size=parallel.tensor_parallel_size,
            data_parallel_size=parallel.data_parallel_size,
            task="generate" if processor.pooler is None else processor.pooler.convert,
            chats=bool(processor.chat_templates.sources),
            defaults=dict(processor.defaults.sampling),
            grpc_port=service.options.grpc_port or None,
            finds_tool_calls=service.formats.tool_parser is not None,
            reports_cached_tokens=service.options.enable_prompt_tokens_details,
            max_images=0 if pictures is None else pictures.config.max_pictures,
            max_image_bytes=0 if pictures is None else pictures.limits.max_bytes,
            max_body_bytes=service.max_body_bytes,
        )
        return Response(msgspec.json.encode(info), headers=HEADERS, media_type="application/json")

    async def state(self, request: Request) -> Response:
        """The engine now: queues, KV blocks, steps. `mine` are ids of responses whose requests are to be recognised."""
        await self._renew()
        ids = request.query_params.getlist("mine")[:MOST_MINE]
        mine = sorted({self._labels.of(each) for each in self._service.traffic.engine_ids(ids)}) if ids else []
        self._answered += 1
        body = b'{"mine":%b,%b' % (msgspec.json.encode(mine), self._encoded[1:])
        return Response(body, headers=HEADERS, media_type="application/json")

    async def _renew(self) -> None:
        """Look again if it is time to, and wait for it, but not for ever."""
        if self._look is None and time.monotonic() >= self._due:
            self._look_began = time.monotonic()
            self._look = asyncio.ensure_future(self._look_at_engine())
            self._look.add_done_callback(self._on_looked)
        if self._look is not None:
            await asyncio.wait([self._look], timeout=max(self._look_began + PATIENCE - time.monotonic(), 0.0))
            if self._look is not None:  # it still looks
                self._tell_silence(time.monotonic() - self._look_began)

    def _on_looked(self, look: asyncio.Task[None]) -> None:
        self._look = None
        error = None if look.cancelled() else look.exception()
        if error is not None:  # the engine restarts, or is no more: that is what there is to see
            if not isinstance(error, EngineError):
                logger.error("the engine could not be watched", exc_info=error)
            self._due = time.monotonic() + INTERVAL
            self._tell_silence(0.0)

    def _tell_silence(self, seconds: float) -> None:
        self._state = msgspec.structs.replace(
            self._state, time=time.monotonic(), silent=seconds, obstacle=self._service.obstacle()
        )
        self._encoded = self._encoder.encode(self._state)

    async def _look_at_engine(self) -> None:
        viewers, self._answered = self._answered, 0
        snapshot = await self._service.engine.snapshot(self._num_steps)
        begin = time.thread_time()
        self._state = self._state_of(snapshot)
        cost = max(snapshot.seconds, time.thread_time() - begin + viewers * ANSWER_SECONDS)
        self._state.wait = max(INTERVAL, cost / SHARE)
        self._encoded = self._encoder.encode(self._state)
        self._due = time.monotonic() + self._state.wait

    def _state_of(self, snapshot: EngineSnapshot) -> EngineState:
        self._add_steps(snapshot)
        service, stats = self._service, snapshot.stats
        numbers: dict[str, Any] = numbers_of(service.engine.get_metrics())
        return EngineState(
            time=time.monotonic(),
            wait=INTERVAL,
            obstacle=self._service.obstacle(),
            sleep_level=stats.sleep_level,
            running=stats.num_running_reqs,
            waiting=stats.num_waiting_reqs,
            kv_usage=stats.kv_cache_usage,
            http=len(service.traffic),
            requests=shown_requests(snapshot, self._labels, time.time()),
            blocks=shown_blocks(snapshot.blocks, snapshot.num_blocks, self._labels),
            encoder=shown_encoder(snapshot, self._labels),
            steps=list(self._steps),
            executor=snapshot.executor,
            **numbers,
        )

    def _add_steps(self, snapshot: EngineSnapshot) -> None:
        """Steps that were lost between two looks leave a gap in their numbers; a new engine begins at 0."""
        first = snapshot.num_steps_before
        if first < self._num_steps:
            self._steps.clear()
        before = self._last_record if first == self._num_steps else None
        self._steps.extend(shown_steps(before, snapshot.steps, first))
        self._num_steps = first + len(snapshot.steps)
        self._last_record = snapshot.steps[-1] if snapshot.steps else before
