"""Calls that need no key: health, as `/ready` says, and reflection.

Since anybody may make them, only so many may be open, and none waits for its client while it holds what others need.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxpaged.serving.service import Service

HEALTH_SECONDS = 1.0
"""How often who watches is told of a change."""
MAX_OPEN = 1024
"""Of each kind, at a time."""
REFLECTION_SECONDS = 60.0
"""For a whole call."""
Status = health_pb2.HealthCheckResponse


class Places:
    """So many calls at a time."""

    def __init__(self, what: str):
        self._what = what
        self._num_open = 0

    @contextlib.asynccontextmanager
    async def taken(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """One of them. Ends the call when there is none."""
        if self._num_open >= MAX_OPEN:
            message = f"{MAX_OPEN} calls of {self._what} are open. Try again later."
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1


class HealthChecks(health_pb2_grpc.HealthServicer):
    """Whether the whole server, called "", and each of `services` is ready."""

    def __init__(self, service: Service, services: Sequence[str]):
        self._service = service
        self._services = {"", *services}
        self._places = Places("Watch")

    def _status(self, service: str) -> int:
        if service not in self._services:
            return Status.SERVICE_UNKNOWN
        return Status.SERVING if self._service.obstacle() is None else Status.NOT_SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> Any:
        status = self._status(request.service)
        if status == Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._places.taken(context):
            told = None
            while True:
                status = self._status(request.service)
                if status != told:
                    await context.write(Status(status=status))
                    told = status
                await asyncio.sleep(HEALTH_SECONDS)


class Reflection(reflection.aio.ReflectionServicer):
    """Describes the services whose names it is given."""

    def __init__(self, names: Sequence[str]):
        super().__init__(names)
        self._places = Places("reflection")

    async def ServerReflectionInfo(self, given: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        async with self._places.taken(context):
            try:
                async with asyncio.timeout(REFLECTION_SECONDS):
                    answers: AsyncGenerator[Any] = super().ServerReflectionInfo(given, context)
                    async with contextlib.aclosing(answers):
                        async for answer in answers:
                            await context.write(answer)
            except TimeoutError:
                message = f"The call was open for {REFLECTION_SECONDS:g} s. Make another one."
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)
