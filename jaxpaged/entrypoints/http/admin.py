"""Endpoints that change the engine for everybody: sleep, wake, forget the prefix cache, abort.

They have a listener of their own, on the loopback address; only `/abort_requests` with ids is for clients too, since
ids that a client did not choose cannot be guessed.
"""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response, read_struct
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.service import Service

WAYS_TO_SLEEP = ("abort", "wait")


class AbortRequest(msgspec.Struct):
    """Ids of answers, such as `chatcmpl-...`."""

    request_ids: list[str]


class SleepState(msgspec.Struct):
    """What `/sleep` and `/wake_up` answer."""

    status: Literal["sleeping", "awake"]
    level: int | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | None | msgspec.UnsetType = msgspec.UNSET


class Admin:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def abort_requests(self, request: Request) -> Response:
        """End the requests with these ids; unknown ones pass. Their clients get what there was so far."""
        wanted = await read_struct(request, AbortRequest, self._service.options.max_body_bytes)
        return await self._abort(wanted.request_ids)

    async def abort_all(self, request: Request) -> Response:
        """End every request."""
        return await self._abort(None)

    async def sleep(self, request: Request) -> Response:
        """Free device memory. `level` 1 keeps the weights on the host, 2 forgets them; `mode` says what becomes of
        requests under way: abort, or wait for them."""
        level = whole_number(request, "level", 1, (0, 1, 2))
        mode = request.query_params.get("mode", "abort")
        if mode not in WAYS_TO_SLEEP:
            raise HttpError(400, f"mode is {mode!r}; it must be one of {', '.join(WAYS_TO_SLEEP)}.", "mode")
        if mode == "abort":
            await self._abort(None)
        await self._service.traffic.wait_until_idle(self._service.options.shutdown_timeout)
        await self._service.engine.sleep(level)
        return json_response(SleepState("sleeping", level=level))

    async def wake_up(self, request: Request) -> Response:
        """Take the memory back; all of it, or what `tags` name."""
        tags = request.query_params.getlist("tags") or None
        await self._service.engine.wake_up(tags)
        status = "sleeping" if await self._service.engine.is_sleeping() else "awake"
        return json_response(SleepState(status, tags=tags))

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        return json_response({"is_sleeping": await self._service.engine.is_sleeping()})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prompt beginnings; false while requests are under way."""
        return json_response({"success": await self._service.engine.reset_prefix_cache()})

    async def _abort(self, request_ids: list[str] | None) -> Response:
        engine_ids = self._service.traffic.engine_ids(request_ids)
        await self._service.engine.abort(engine_ids)
        return json_response({"num_aborted": len(engine_ids)})


def whole_number(request: Request, name: str, default: int, allowed: tuple[int, ...]) -> int:
    """A query parameter. Raises HttpError 400 for a value that is not allowed."""
    text = request.query_params.get(name, str(default))
    if text not in map(str, allowed):
        raise HttpError(400, f"{name} is {text!r}; it must be one of {', '.join(map(str, allowed))}.", name)
    return int(text)
