"""`GET /kv_event_sources`: where routers can follow what is in the prefix caches of this server's engine cores."""

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.serving.service import Service

if TYPE_CHECKING:
    from jaxpaged.engine.observability.kv_event_publisher import KVEventsConfig


class EventSource(msgspec.Struct):
    """One core's addresses, as they were configured, and the topic of its events."""

    data_parallel_rank: int
    endpoint: str
    replay_endpoint: str | None
    topic: str


class EventSources(msgspec.Struct):
    """Those of all cores; none where events are not published."""

    kv_event_sources: list[EventSource]


class KVEventSources:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def read(self, request: Request) -> Response:
        """Where KV cache events are published, for each engine core."""
        return json_response(EventSources(sources_of(self._service)))


def sources_of(service: Service) -> list[EventSource]:
    config = service.engine.config
    if not config.cache.kv_events_config:
        return []
    from jaxpaged.engine.observability.kv_event_publisher import KVEventsConfig  # with ZeroMQ

    events = KVEventsConfig.from_option(config.cache.kv_events_config)
    if events is None:
        return []
    return [source_of(events.of_rank(rank)) for rank in range(config.parallel.data_parallel_size)]


def source_of(events: "KVEventsConfig") -> EventSource:
    replay = events.replay_endpoint and events.endpoint_of_rank(events.replay_endpoint)
    return EventSource(events.data_parallel_rank, events.endpoint_of_rank(events.endpoint), replay, events.topic)
