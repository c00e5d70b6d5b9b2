"""The routes `POST /v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`.

Embedding models score by comparing vectors, classifiers by reading the pair.
"""

import functools

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.pooling.io_processor import PLUGIN_TASK
from jaxpaged.entrypoints.http.body import read_struct
from jaxpaged.entrypoints.http.pooling import write
from jaxpaged.entrypoints.http.pooling.parse import parse_inputs, parse_rerank, parse_score
from jaxpaged.entrypoints.http.pooling.processed import respond_processed
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolRequest,
    RerankRequest,
    ScoreRequest,
)
from jaxpaged.entrypoints.http.respond import Stages, respond, respond_to
from jaxpaged.serving.service import Service

EMBEDDINGS = Stages("embd", EmbeddingRequest, functools.partial(parse_inputs, "embed"), write.embeddings)
NUMBERS = Stages("pool", PoolRequest, functools.partial(parse_inputs, None), write.numbers)
CLASSES = Stages("classify", ClassifyRequest, functools.partial(parse_inputs, "classify"), write.classes)
SCORES = Stages("score", ScoreRequest, parse_score, write.scores)
RANKINGS = Stages("rerank", RerankRequest, parse_rerank, write.ranking)


class Pooling:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def embed(self, request: Request) -> Response:
        """Embeddings of texts or token ids."""
        return await respond(self._service, EMBEDDINGS, request)

    async def pool(self, request: Request) -> Response:
        """What the model gives for texts or token ids: an embedding, or a number for every label. What an I/O processor
        answers to `data`."""
        await self._service.pace.turn()
        body = await read_struct(request, PoolRequest, self._service.max_body_bytes)
        if body.data is None and body.task != PLUGIN_TASK:
            return await respond_to(self._service, NUMBERS, request, body)
        return await respond_processed(self._service, request, body)

    async def classify(self, request: Request) -> Response:
        """The most likely label of texts or token ids, with the probabilities of all."""
        return await respond(self._service, CLASSES, request)

    async def score(self, request: Request) -> Response:
        """How well two texts fit, for one pair or many."""
        return await respond(self._service, SCORES, request)

    async def rerank(self, request: Request) -> Response:
        """Documents in order of how well they fit a query."""
        return await respond(self._service, RANKINGS, request)
