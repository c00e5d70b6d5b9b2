"""`POST /score` and `/rerank`: how well texts fit. Embedding models compare vectors, classifiers read the pair."""

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.pooling.scoring import cosine, paired
from jaxpaged.entrypoints.http.body import json_response, off_loop, read_struct
from jaxpaged.entrypoints.http.errors import HttpError, client_names
from jaxpaged.entrypoints.http.openai.usage import Usage
from jaxpaged.entrypoints.http.pooling.protocol import (
    Document,
    PoolingFields,
    RerankItem,
    RerankRequest,
    RerankResponse,
    RerankUsage,
    ScoreItem,
    ScoreRequest,
    ScoreResponse,
)
from jaxpaged.entrypoints.http.pooling.running import (
    PoolingWork,
    check_count,
    check_fields,
    pool_all,
    pooler_of,
    read_prompts,
    usage_of,
)
from jaxpaged.entrypoints.http.service import Service
from jaxpaged.pooling import PoolingParams

NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class Scoring:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def score(self, request: Request) -> Response:
        """How well two texts fit, for one pair or many."""
        service = self._service
        wanted = await read_struct(request, ScoreRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        names, first, second = texts_of(wanted)
        request_id = service.request_id(request, "score", wanted.request_id)

        async def run() -> Response:
            scores, usage = await self.scores(request_id, wanted, names, first, second)
            data = [ScoreItem(index=i, score=score) for i, score in enumerate(scores)]
            return json_response(
                ScoreResponse(id=request_id, created=int(time.time()), model=model, data=data, usage=usage)
            )

        return await service.answered(request, request_id, run())

    async def rerank(self, request: Request) -> Response:
        """Documents in order of how well they fit a query."""
        service = self._service
        wanted = await read_struct(request, RerankRequest, service.options.max_body_bytes)
        model = service.check_model(wanted.model)
        check_rerank(wanted)
        documents = [each.text if isinstance(each, Document) else each for each in wanted.documents]
        request_id = service.request_id(request, "rerank", wanted.request_id)

        async def run() -> Response:
            scores, usage = await self.scores(request_id, wanted, ("query", "documents"), [wanted.query], documents)
            order = sorted(range(len(scores)), key=lambda i: -scores[i])[: wanted.top_n or None]
            shown = wanted.return_documents is not False
            results = [
                RerankItem(index=i, document=Document(documents[i]) if shown else None, relevance_score=scores[i])
                for i in order
            ]
            counts = RerankUsage(usage.prompt_tokens, usage.total_tokens, usage.prompt_tokens_details)
            return json_response(RerankResponse(id=request_id, model=model, usage=counts, results=results))

        return await service.answered(request, request_id, run())

    async def scores(
        self, request_id: str, wanted: PoolingFields, names: tuple[str, str], first: list[str], second: list[str]
    ) -> tuple[list[float], Usage]:
        """The score of every pair, and the tokens of all. Raises HttpError, RequestError, and what `pool_all` does."""
        service = self._service
        pooler = pooler_of(service)
        check_fields(wanted)
        check_count(names[1], len(second))
        pairs = paired(first, second, names)
        classifies = pooler.convert == "classify"
        if classifies and pooler.width != 1:
            raise HttpError(
                400, f"This model has {pooler.width} labels, and a score is one number. Use /classify.", "model"
            )
        params = PoolingParams(
            task="score" if classifies else "embed", use_activation=wanted.use_activation, normalize=wanted.normalize
        )
        pooler.check(params)
        given = [(first[i], second[j]) for i, j in pairs] if classifies else [*first, *second]
        with client_names({"prompt": names[1]}):
            prompts = await off_loop(read_prompts, service, given, wanted, names[1])
            outputs = await pool_all(service, PoolingWork(request_id, prompts, params, wanted.priority or 0))
        usage = usage_of(service, outputs)
        vectors = [output.outputs.data for output in outputs]
        if classifies:
            return [float(vector[0]) for vector in vectors], usage
        return [cosine(vectors[i], vectors[len(first) + j]) for i, j in pairs], usage


def texts_of(wanted: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """(names, first texts, second texts) of the one pair of fields that is given. Raises HttpError 400."""
    given = {name for pair in NAMES for name in pair if getattr(wanted, name) is not None}
    for names in NAMES:
        if given == set(names):
            first, second = (as_list(getattr(wanted, name)) for name in names)
            return names, first, second
    raise HttpError(
        400, f"Given are {', '.join(sorted(given)) or 'no texts'}. Give text_1 and text_2, queries and documents, "
        "queries and items, or data_1 and data_2.", sorted(given)[0] if given else "text_1",
    )  # fmt: skip


def as_list(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def check_rerank(wanted: RerankRequest) -> None:
    """Raise HttpError 400 for what this endpoint cannot do."""
    if wanted.top_n is not None and wanted.top_n < 0:
        raise HttpError(400, f"top_n is {wanted.top_n}; it must be at least 0, which means all.", "top_n")
    for name in ("max_tokens_per_doc", "max_tokens_per_query", "instruction"):
        if getattr(wanted, name) not in (None, 0, ""):
            raise HttpError(400, f"{name} is given, but is not supported. Use truncate_prompt_tokens.", name)
