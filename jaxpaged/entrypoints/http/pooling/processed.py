"""`POST /pooling` with `data`: an I/O processor of a plugin makes prompts of it, and the answer of their numbers."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.pooling.io_processor import IOProcessing, processor_of, without_task
from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.entrypoints.http.pooling.parse import check_fields, request_of
from jaxpaged.entrypoints.http.pooling.protocol import PoolRequest, ProcessedResponse
from jaxpaged.entrypoints.http.respond import context_of, unless_left
from jaxpaged.errors import EngineError
from jaxpaged.pooling import PoolingParams
from jaxpaged.serving.errors import ErrorKind, ServingError, scrubbed
from jaxpaged.serving.generate import collect
from jaxpaged.serving.pooling import check_count, pooled, pooler_of
from jaxpaged.serving.requests import RequestContext, check_depth, off_loop
from jaxpaged.serving.service import Service

NOT_WITH_DATA = ("input", "dimensions", "encoding_format")


async def respond_processed(service: Service, request: Request, body: PoolRequest) -> Response:
    """The response to a body with `data`. Raises ServingError and RequestError."""
    check_fields(body)
    if body.data is None:
        raise ServingError('task is "plugin", but data is not given. Give it.', "data")
    for name in NOT_WITH_DATA:
        if getattr(body, name) is not None:
            raise ServingError(f"{name} and data are given. An I/O processor takes data alone.", name)
    check_depth("data", body.data)
    processing = processor_of(service.engine.input_processor)
    context = await context_of(service, "pool", request, body)
    work = answered(service, processing, body, context)
    return await unless_left(service, request, context.request_id, work)


async def answered(service: Service, processing: IOProcessing, body: PoolRequest, context: RequestContext) -> Response:
    params = without_task(PoolingParams(task=body.task, use_activation=body.use_activation, normalize=body.normalize))
    with told():
        prompts, params = await processing.prepared_async(body.data, params, context.request_id)
    check_count("data", len(prompts))
    pooler_of(service).check(params)
    generation = await off_loop(context.num_bytes, pooled, service, prompts, request_of(body, "data"), params, context)
    outputs = await collect(service.engine, service.traffic, generation)
    with told():
        data = await processing.answer_async(outputs, context.request_id, encoded)
    answer = ProcessedResponse(request_id=context.request_id, created_at=int(time.time()), data=data)
    return json_response(answer)


def encoded(answer: Any) -> msgspec.Raw:
    """An answer as JSON, in the processor's own thread. Raises TypeError for what JSON cannot say."""
    return msgspec.Raw(msgspec.json.encode(answer))


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Tell clients that the processor failed, which another try will not mend."""
    try:
        yield
    except EngineError as error:
        raise ServingError(scrubbed(str(error)), "data", kind=ErrorKind.INTERNAL) from error
