"""`POST /v1/embeddings`, `/pooling` and `/classify`: the numbers of every input."""

import base64
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response, read_struct
from jaxpaged.entrypoints.http.errors import client_names
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    ClassifyResponse,
    ClassItem,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PooledItem,
    PoolingResponse,
)
from jaxpaged.entrypoints.http.pooling.running import (
    PoolingWork,
    check_fields,
    inputs_of,
    pool_all,
    pooler_of,
    read_prompts,
    usage_of,
)
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput


class Vectors:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def embed(self, request: Request) -> Response:
        """Embeddings of texts or token ids."""
        service = self._service
        wanted = await read_struct(request, EmbeddingRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        pooler_of(service, "embed")
        work = await self._work(request, wanted, "embd", "embed")

        def answer(outputs: Sequence[PoolingRequestOutput]) -> EmbeddingResponse:
            as_base64 = wanted.encoding_format == "base64"
            data = [Embedding(index=i, embedding=written(each, as_base64)) for i, each in enumerate(outputs)]
            return EmbeddingResponse(
                id=work.request_id, created=int(time.time()), model=model, data=data, usage=usage_of(service, outputs)
            )

        return await self._answer(request, work, answer)

    async def pool(self, request: Request) -> Response:
        """What the model gives for texts or token ids: an embedding, or a number for every label."""
        service = self._service
        wanted = await read_struct(request, EmbeddingRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        pooler_of(service)
        work = await self._work(request, wanted, "pool", None)

        def answer(outputs: Sequence[PoolingRequestOutput]) -> PoolingResponse:
            as_base64 = wanted.encoding_format == "base64"
            data = [PooledItem(index=i, data=written(each, as_base64)) for i, each in enumerate(outputs)]
            return PoolingResponse(
                id=work.request_id, created=int(time.time()), model=model, data=data, usage=usage_of(service, outputs)
            )

        return await self._answer(request, work, answer)

    async def classify(self, request: Request) -> Response:
        """The most likely label of texts or token ids, with the probabilities of all."""
        service = self._service
        wanted = await read_struct(request, ClassifyRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        labels = pooler_of(service, "classify").labels
        work = await self._work(request, wanted, "classify", "classify")

        def answer(outputs: Sequence[PoolingRequestOutput]) -> ClassifyResponse:
            data = [class_item(i, each.outputs.data, labels) for i, each in enumerate(outputs)]
            return ClassifyResponse(
                id=work.request_id, created=int(time.time()), model=model, data=data, usage=usage_of(service, outputs)
            )

        return await self._answer(request, work, answer)

    async def _work(
        self, request: Request, wanted: EmbeddingRequest | ClassifyRequest, prefix: str, task: str | None
    ) -> PoolingWork:
        service = self._service
        check_fields(wanted)
        params = PoolingParams(
            task=task, dimensions=getattr(wanted, "dimensions", None), use_activation=wanted.use_activation,
            normalize=wanted.normalize,
        )  # fmt: skip
        service.engine.input_processor.pooler.check(params)
        with client_names({"prompt": "input"}):
            prompts = await read_prompts(service, inputs_of(wanted.input), wanted, "input")
        return PoolingWork(
            service.request_id(request, prefix, wanted.request_id), prompts, params, wanted.priority or 0
        )

    async def _answer(self, request: Request, work: PoolingWork, answer: Any) -> Response:
        async def run() -> Response:
            with client_names({"prompt": "input"}):
                return json_response(answer(await pool_all(self._service, work)))

        return await self._service.answered(request, work.request_id, run())


def written(output: PoolingRequestOutput, as_base64: bool) -> list[float] | str:
    """The numbers as JSON has them: a list, or little-endian float32 in base64, in a third of the bytes."""
    data = np.asarray(output.outputs.data, "<f4")
    return base64.b64encode(data.tobytes()).decode() if as_base64 else data.tolist()


def class_item(index: int, probs: np.ndarray, labels: Sequence[str]) -> ClassItem:
    return ClassItem(index=index, label=labels[int(probs.argmax())], probs=probs.tolist(), num_classes=len(probs))
