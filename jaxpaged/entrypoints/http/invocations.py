"""`POST /invocations`: the one path on which SageMaker asks a container for everything.

What a body is about says which endpoint's it is.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import decoded, read_json, struct_of
from jaxpaged.entrypoints.http.openai.chat import CHATS
from jaxpaged.entrypoints.http.openai.completions import COMPLETIONS
from jaxpaged.entrypoints.http.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
)
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from jaxpaged.entrypoints.http.pooling.routes import CLASSES, EMBEDDINGS, RANKINGS, SCORES
from jaxpaged.entrypoints.http.respond import Stages, respond_to
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.service import Service

ANY_REQUEST = (
    ChatCompletionRequest | CompletionRequest | EmbeddingRequest | ClassifyRequest | ScoreRequest | RerankRequest
)
ANY_RESPONSE = (
    ChatCompletionResponse | CompletionResponse | EmbeddingResponse | ClassifyResponse | ScoreResponse | RerankResponse
)
GENERATING = {"messages": CHATS, "prompt": COMPLETIONS}
"""Field -> what a body is that has it, where the model generates."""
SCORING = {"query": RANKINGS, **dict.fromkeys(("text_1", "queries", "data_1"), SCORES)}
"""The same where it pools, besides `input`, which is for what the model was started for."""


class Invocations:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def invoke(self, request: Request) -> Response:
        """Whatever the body asks for: a chat, a completion, embeddings, classes, scores, or a ranking."""
        service = self._service
        await service.pace.turn()
        body = await read_json(request, service.max_body_bytes)
        stages = stages_of(service, decoded(body, dict[str, msgspec.Raw]))
        return await respond_to(service, stages, request, await struct_of(request, body, stages.body))


def stages_of(service: Service, fields: dict[str, msgspec.Raw]) -> Stages:
    """What a body with these fields asks for. Raises ServingError where that cannot be seen."""
    pooler = service.engine.input_processor.pooler
    if pooler is None:
        known = GENERATING
    else:
        known = {**SCORING, "input": CLASSES if pooler.convert == "classify" else EMBEDDINGS}
    for field, stages in known.items():
        if field in fields:
            return stages
    *others, last = known
    raise ServingError(f"The body has neither {', '.join(others)} nor {last}. Give one of them.", last)
