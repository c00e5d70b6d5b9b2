"""Endpoints that change the engine for everybody: sleep, wake, forget the prefix cache, abort, profile.

They have a listener of their own, on the loopback address; only `/abort_requests` with ids is for clients too, since
ids that a client did not choose cannot be guessed.
"""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.sleep import LEVELS, MODES, TAGS
from jaxpaged.entrypoints.http.body import json_response, read_struct
from jaxpaged.entrypoints.http.endpoint import flag
from jaxpaged.errors import CapacityError, CheckpointError
from jaxpaged.serving.errors import ErrorKind, ServingError, scrubbed
from jaxpaged.serving.requests import check_choice
from jaxpaged.serving.service import Service


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Ids of responses, such as `chatcmpl-...`."""

    request_ids: list[str]


class SleepState(msgspec.Struct):
    """What `/sleep` and `/wake_up` answer: an engine sleeps until all of it is awake."""

    status: Literal["sleeping", "awake"]
    level: int | msgspec.UnsetType = msgspec.UNSET
    tags: list[str] | None | msgspec.UnsetType = msgspec.UNSET


class ProfileState(msgspec.Struct):
    """What `/start_profile` and `/stop_profile` answer."""

    profiling: bool


class Admin:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def abort_requests(self, request: Request) -> Response:
        """End the requests with these ids; unknown ones pass. Their clients get what there was so far."""
        body = await read_struct(request, AbortRequest, self._service.max_body_bytes)
        return await self._abort(body.request_ids)

    async def abort_all(self, request: Request) -> Response:
        """End every request."""
        return await self._abort(None)

    async def sleep(self, request: Request) -> Response:
        """Free device memory. `level` 0 only pauses, 1 keeps the weights on the host, 2 forgets them; `mode` says what
        becomes of requests under way: abort, wait for them, or keep them until the engine is awake."""
        level = whole_number(request, "level", 1, LEVELS)
        mode = request.query_params.get("mode", MODES[0])
        check_choice("mode", mode, MODES)
        await self._service.engine.sleep(level, mode)
        return json_response(SleepState("sleeping", level=self._service.engine.sleep_level))

    async def wake_up(self, request: Request) -> Response:
        """Take the memory back; all of it, or what `tags` name."""
        tags = request.query_params.getlist("tags") or None
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        try:
            await self._service.engine.wake_up(tags)
        except (CapacityError, CheckpointError) as error:
            raise ServingError(scrubbed(str(error)), kind=ErrorKind.UNAVAILABLE) from error
        status = "sleeping" if await self._service.engine.is_sleeping() else "awake"
        return json_response(SleepState(status, tags=tags))

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine sleeps."""
        return json_response({"is_sleeping": await self._service.engine.is_sleeping()})

    async def start_profile(self, request: Request) -> Response:
        """Record what the devices do, to the folder of --profile-dir. 409 while a recording is under way."""
        await self._service.engine.start_profile()
        return json_response(ProfileState(True))

    async def stop_profile(self, request: Request) -> Response:
        """Write the recording. 409 when there is none."""
        await self._service.engine.stop_profile()
        return json_response(ProfileState(False))

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget all cached prompt beginnings; false while requests are under way, unless `reset_running_requests` has
        those that run computed again."""
        if flag(request, "reset_external"):
            raise ServingError(
                "reset_external is true, but KV tiers are not emptied here. Leave it out; 'jaxpaged kv' shows and "
                "prunes what they hold.",
                "reset_external",
            )
        done = await self._service.engine.reset_prefix_cache(flag(request, "reset_running_requests"))
        return json_response({"success": done})

    async def _abort(self, request_ids: list[str] | None) -> Response:
        engine_ids = self._service.traffic.engine_ids(request_ids)
        await self._service.engine.abort(engine_ids)
        return json_response({"num_aborted": len(engine_ids)})


def whole_number(request: Request, name: str, default: int, allowed: tuple[int, ...]) -> int:
    """A query parameter. Raises ServingError for a value that is not allowed."""
    text = request.query_params.get(name, str(default))
    check_choice(name, text, [str(each) for each in allowed])
    return int(text)
