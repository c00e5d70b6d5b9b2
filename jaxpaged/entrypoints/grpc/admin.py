"""The service `jaxpaged.v1.Admin`: what changes the engine for everybody. Its keys are its own."""

from jaxpaged.engine.sleep import LEVELS, MODES, TAGS
from jaxpaged.errors import CapacityError, CheckpointError
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.errors import ErrorKind, ServingError, scrubbed
from jaxpaged.serving.requests import RequestContext, check_choice
from jaxpaged.serving.service import Service


class Administration:
    """The methods. They raise ServingError, ConflictError, UsageError and EngineError."""

    def __init__(self, service: Service):
        self._engine = service.engine
        self._traffic = service.traffic

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: RequestContext
    ) -> pb.ResetPrefixCacheResponse:
        return pb.ResetPrefixCacheResponse(success=await self._engine.reset_prefix_cache())

    async def AbortAll(self, request: pb.AbortAllRequest, context: RequestContext) -> pb.AbortResponse:
        ids = self._traffic.engine_ids()
        await self._engine.abort(ids)
        return pb.AbortResponse(num_aborted=len(ids))

    async def Sleep(self, request: pb.SleepRequest, context: RequestContext) -> pb.SleepResponse:
        level = request.level if request.HasField("level") else 1
        mode = request.mode or MODES[0]
        check_choice("level", str(level), [str(each) for each in LEVELS])
        check_choice("mode", mode, MODES)
        await self._engine.sleep(level, mode)
        return await self._state()

    async def WakeUp(self, request: pb.WakeUpRequest, context: RequestContext) -> pb.SleepResponse:
        for tag in request.tags:
            check_choice("tags", tag, TAGS)
        try:
            await self._engine.wake_up(list(request.tags) or None)
        except (CapacityError, CheckpointError) as error:
            raise ServingError(scrubbed(str(error)), kind=ErrorKind.UNAVAILABLE) from error
        return await self._state()

    async def StartProfile(self, request: pb.StartProfileRequest, context: RequestContext) -> pb.ProfileResponse:
        await self._engine.start_profile()
        return pb.ProfileResponse(profiling=True)

    async def StopProfile(self, request: pb.StopProfileRequest, context: RequestContext) -> pb.ProfileResponse:
        await self._engine.stop_profile()
        return pb.ProfileResponse(profiling=False)

    async def _state(self) -> pb.SleepResponse:
        return pb.SleepResponse(sleeping=await self._engine.is_sleeping(), level=self._engine.sleep_level)
