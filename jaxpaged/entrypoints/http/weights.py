"""Updates of the weights by a trainer in another process, with vLLM's paths and phases, on the admin listener.

The trainer writes safetensors files, into shared memory or a disk, and names them here. They are read only from the
folders of `allowed_weight_dirs`. Or it offers arrays, which are pulled only from `allowed_weight_hosts`. Without either
the endpoints that change weights are not there.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.config.offer_address import parsed
from jaxpaged.engine.observability.logprob_difference import LogprobDifference
from jaxpaged.engine.sleep import MODES
from jaxpaged.entrypoints.http.body import check_media_type, json_response, read_body, read_struct, struct_of
from jaxpaged.entrypoints.http.endpoint import flag
from jaxpaged.errors import CapacityError, CheckpointError, ConflictError, ServerError, UsageError
from jaxpaged.messages import WeightInfo
from jaxpaged.serving.adapter_resolvers import below
from jaxpaged.serving.errors import ErrorKind, ServingError, scrubbed
from jaxpaged.serving.requests import check_choice
from jaxpaged.serving.service import Service

FILE, TRANSFER = "file", "transfer"
MOST_PATHS = 4096


class InitRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`init_info` may name the backend: "file" or "transfer"."""

    init_info: dict[str, Any] = {}


class StartRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`is_partial`: parameters that are not sent stay. `is_checkpoint_format`: names and shapes are the checkpoint's,
    as they must be."""

    is_partial: bool = False
    is_checkpoint_format: bool = True


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Safetensors files, or folders of them; or the address where a trainer offers arrays. `mapping`: there is a tree
    of a framework, in an orbax checkpoint or an offer; see `LLM.update_weights`."""

    paths: list[str] = []
    address: str = ""
    mapping: str | None = None


class UpdateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the weights."""

    update_info: Part


class FinishRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`version`: what outputs call the weights."""

    version: str = ""


Difference = Annotated[float, msgspec.Meta(ge=0)] | None
"""JSON has no NaN: null stands for it."""


class DifferenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How far a trainer's log probabilities are from the engine's: see `LogprobDifference`."""

    mean: Difference
    p99: Difference
    largest: Difference
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]


class PauseState(msgspec.Struct):
    """What `/pause` and `/resume` answer."""

    status: Literal["paused", "resumed"]


class Weights:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service
        self._folders = [Path(folder).expanduser().resolve() for folder in service.options.allowed_weight_dirs]
        self._hosts = service.options.allowed_weight_hosts

    async def pause(self, request: Request) -> Response:
        """Compute nothing until `/resume`. `mode`: requests under way end (abort), are finished first (wait), or go on
        afterwards (keep); `clear_cache`: what was computed of prompts is forgotten."""
        mode = request.query_params.get("mode", MODES[0])
        check_choice("mode", mode, MODES)
        clear = "clear_cache" not in request.query_params or flag(request, "clear_cache")
        await self._service.engine.pause_generation(mode, clear)
        return json_response(PauseState("paused"))

    async def resume(self, request: Request) -> Response:
        """Go on after `/pause`."""
        await self._service.engine.resume_generation()
        return json_response(PauseState("resumed"))

    async def is_paused(self, request: Request) -> Response:
        """Whether nothing is computed until the engine is woken or resumed."""
        return json_response({"is_paused": await self._service.engine.is_sleeping()})

    async def info(self, request: Request) -> Response:
        """Which weights compute now, and whether others come."""
        return json_response(await self._service.engine.get_weight_info())

    async def note_difference(self, request: Request) -> Response:
        """Show how far a trainer's log probabilities are from the engine's among the metrics."""
        body = await read_struct(request, DifferenceRequest, self._service.max_body_bytes)
        told = [float("nan") if each is None else each for each in (body.mean, body.p99, body.largest)]
        self._service.engine.note_logprob_difference(LogprobDifference(*told, body.num_tokens))
        return json_response({"message": "Difference noted"})

    async def init(self, request: Request) -> Response:
        """Ask whether weights can be sent in this way."""
        body = await read_struct(request, InitRequest, self._service.max_body_bytes)
        allowed = [each for each, option in ((FILE, self._folders), (TRANSFER, self._hosts)) if option]
        if body.init_info.get("backend", allowed[0]) not in allowed or body.init_info.keys() - {"backend"}:
            raise ServingError(
                f"init_info is {msgspec.json.encode(body.init_info).decode()[:80]}, but weights come so: "
                f"{', '.join(allowed)}. Give that as backend, and what to read to /update_weights.",
                "init_info",
            )
        return json_response({"message": "Weight transfer initialized"})

    async def start(self, request: Request) -> Response:
        """Begin an update; one that was begun before is forgotten. 409 while the weights sleep."""
        body = await read_struct(request, StartRequest, self._service.max_body_bytes)
        if not body.is_checkpoint_format:
            raise ServingError("is_checkpoint_format is false, but names and shapes must be the checkpoint's.")
        await self._service.engine.start_weight_update(body.is_partial)
        return json_response({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        """Send a part of the weights. 400 for what does not fit, 503 for a trainer who is not there: nothing of it is
        taken. 409 when none was begun."""
        body = await read_struct(request, UpdateRequest, self._service.max_body_bytes)
        part = self._allowed(body.update_info)
        try:
            num_bytes = await self._service.engine.update_weights(part, body.update_info.mapping)
        except ConflictError:
            raise
        except (CheckpointError, UsageError) as error:
            raise ServingError(scrubbed(str(error)), "update_info") from error
        except ServerError as error:
            raise ServingError(scrubbed(str(error)), kind=ErrorKind.UNAVAILABLE) from error
        return json_response({"message": "Weights updated", "num_bytes": num_bytes})

    async def finish(self, request: Request) -> Response:
        """Compute with the weights that were sent. 400 when some are missing: more can be sent."""
        given = await read_body(request, self._service.max_body_bytes)
        body = FinishRequest()  # as TRL sends it: without a body
        if given:
            check_media_type(request.headers.get("content-type", ""))
            body = await struct_of(request, given, FinishRequest)
        try:
            info: WeightInfo = await self._service.engine.finish_weight_update(body.version)
        except CheckpointError as error:
            raise ServingError(scrubbed(str(error))) from error
        except CapacityError as error:
            raise ServingError(scrubbed(str(error)), kind=ErrorKind.UNAVAILABLE) from error
        return json_response({"message": "Weight update finished", **msgspec.structs.asdict(info)})

    async def abandon(self, request: Request) -> Response:
        """Give up an update that was begun."""
        await self._service.engine.abandon_weight_update()
        return json_response({"message": "Weight update abandoned"})

    def _allowed(self, part: Part) -> list[str]:
        """The paths without links, or the address. Raises ServingError for what options do not allow."""
        if part.address and not part.paths:
            with contextlib.suppress(CheckpointError):
                if parsed(part.address)[0] in self._hosts:
                    return [part.address]
            raise ServingError(
                f"{part.address[:200]!r} is no transfer://HOST:PORT of a host of allowed_weight_hosts.", "update_info"
            )
        if part.address or not part.paths or len(part.paths) > MOST_PATHS:
            raise ServingError(
                f"update_info names {len(part.paths)} files and {bool(part.address):d} addresses; it must name 1 to "
                f"{MOST_PATHS} files, or an address.",
                "update_info",
            )
        found = [below(Path(path), self._folders) for path in part.paths]
        if None in found:
            raise ServingError(
                f"{part.paths[found.index(None)][:200]!r} does not lie below a folder of allowed_weight_dirs.",
                "update_info",
            )
        return [str(path) for path in found]
