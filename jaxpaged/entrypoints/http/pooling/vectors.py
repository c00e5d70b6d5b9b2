"""`POST /v1/embeddings`, `/pooling` and `/classify`: the numbers of every input."""

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.big_answer import answer_of
from jaxpaged.entrypoints.http.body import off_loop, read_struct
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
from jaxpaged.pooling import PoolingParams

NUMBER_BYTES = 12
"""Of a number in an answer, about."""


class Kind(NamedTuple):
    """What one endpoint reads and writes. `item(index, numbers, wanted, labels)` is the answer's part for an input."""

    asked: type
    answer: type
    prefix: str  # of ids
    task: str | None  # None: whatever the model does
    item: Callable[[int, np.ndarray, Any, Sequence[str]], Any]


class Vectors:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def embed(self, request: Request) -> Response:
        """Embeddings of texts or token ids."""
        return await self._answered(request, EMBEDDINGS)

    async def pool(self, request: Request) -> Response:
        """What the model gives for texts or token ids: an embedding, or a number for every label."""
        return await self._answered(request, NUMBERS)

    async def classify(self, request: Request) -> Response:
        """The most likely label of texts or token ids, with the probabilities of all."""
        return await self._answered(request, LABELS)

    async def _answered(self, request: Request, kind: Kind) -> Response:
        service = self._service
        wanted = await read_struct(request, kind.asked, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        labels = pooler_of(service, kind.task).labels
        request_id = service.request_id(request, kind.prefix, wanted.request_id)
        work = await self.work(wanted, request_id, kind.task)

        async def run() -> Response:
            with client_names({"prompt": "input"}):
                outputs = await pool_all(service, work)

                def answer() -> Any:
                    data = [kind.item(i, each.outputs.data, wanted, labels) for i, each in enumerate(outputs)]
                    usage, created = usage_of(service, outputs), int(time.time())
                    return kind.answer(id=work.request_id, created=created, model=model, data=data, usage=usage)

                return await answer_of(NUMBER_BYTES * sum(each.outputs.data.size for each in outputs), answer)

        return await service.answered(request, work.request_id, run())

    async def work(self, wanted: EmbeddingRequest | ClassifyRequest, request_id: str, task: str | None) -> PoolingWork:
        """What the engine is asked for. Raises HttpError and RequestError 400."""
        return await off_loop(self._work, wanted, request_id, task)

    def _work(self, wanted: EmbeddingRequest | ClassifyRequest, request_id: str, task: str | None) -> PoolingWork:
        service = self._service
        check_fields(wanted)
        params = PoolingParams(
            task=task, dimensions=getattr(wanted, "dimensions", None), use_activation=wanted.use_activation,
            normalize=wanted.normalize,
        )  # fmt: skip
        service.engine.input_processor.pooler.check(params)
        with client_names({"prompt": "input"}):
            prompts = read_prompts(service, inputs_of(wanted.input), wanted, "input")
        return PoolingWork(request_id, prompts, params, wanted.priority or 0)


def embedding(index: int, numbers: np.ndarray, wanted: EmbeddingRequest, labels: Sequence[str]) -> Embedding:
    return Embedding(index=index, embedding=written(numbers, wanted))


def pooled_item(index: int, numbers: np.ndarray, wanted: EmbeddingRequest, labels: Sequence[str]) -> PooledItem:
    return PooledItem(index=index, data=written(numbers, wanted))


def class_item(index: int, probs: np.ndarray, wanted: ClassifyRequest, labels: Sequence[str]) -> ClassItem:
    return ClassItem(index=index, label=labels[int(probs.argmax())], probs=probs.tolist(), num_classes=len(probs))


def written(numbers: np.ndarray, wanted: EmbeddingRequest) -> list[float] | str:
    """The numbers as JSON has them: a list, or little-endian float32 in base64, in a third of the bytes."""
    data = np.asarray(numbers, "<f4")
    return base64.b64encode(data.tobytes()).decode() if wanted.encoding_format == "base64" else data.tolist()


EMBEDDINGS = Kind(EmbeddingRequest, EmbeddingResponse, "embd", "embed", embedding)
NUMBERS = Kind(EmbeddingRequest, PoolingResponse, "pool", None, pooled_item)
LABELS = Kind(ClassifyRequest, ClassifyResponse, "classify", "classify", class_item)
