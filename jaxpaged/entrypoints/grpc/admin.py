"""The service `jaxpaged.v1.Admin`: what changes the engine for everybody. Its keys are its own."""

from jaxpaged.engine.sleep import LEVELS, MODES, TAGS
from jaxpaged.entrypoints.grpc.responses import lora_adapter
from jaxpaged.errors import CapacityError, CheckpointError
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.adapters import ServedAdapters
from jaxpaged.serving.errors import ErrorKind, ServingError, scrubbed
from jaxpaged.serving.requests import RequestContext, check_choice
from jaxpaged.serving.service import Service


class Administration:
    """The methods. They raise ServingError, ConflictError, UsageError and EngineError."""

    def __init__(self, service: Service):
        self._service = service
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

    async def LoadLoraAdapter(
        self, request: pb.LoadLoraAdapterRequest, context: RequestContext
    ) -> pb.LoadLoraAdapterResponse:
        base = request.base_model_name or None
        adapters, name = self._adapters(), request.lora_name
        await adapters.load(name, request.lora_path, in_place=request.load_inplace, base_model_name=base)
        served = adapters.get(name)
        return pb.LoadLoraAdapterResponse(adapter=None if served is None else lora_adapter(self._service, served))

    async def UnloadLoraAdapter(
        self, request: pb.UnloadLoraAdapterRequest, context: RequestContext
    ) -> pb.UnloadLoraAdapterResponse:
        await self._adapters().unload(request.lora_name)
        return pb.UnloadLoraAdapterResponse()

    def _adapters(self) -> ServedAdapters:
        """Raises ServingError where none may be loaded while the server runs."""
        adapters = self._service.adapters
        if adapters is None or not adapters.loads_at_runtime:
            raise ServingError(
                "This server loads no adapters while it runs. Start it with --enable-lora and --allowed-lora-dirs.",
                kind=ErrorKind.FORBIDDEN,
            )
        return adapters

    async def _state(self) -> pb.SleepResponse:
        return pb.SleepResponse(sleeping=await self._engine.is_sleeping(), level=self._engine.sleep_level)
