"""Results of the engine as what the endpoints that pool answer: the numbers of every input, or scores of pairs."""

import base64
import time
from collections.abc import Sequence

import numpy as np

from jaxpaged.entrypoints.http.openai.protocol import PromptTokensDetails, Usage
from jaxpaged.entrypoints.http.pooling.parse import ParsedPairs
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyResponse,
    ClassItem,
    Document,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PooledItem,
    PooledResponse,
    PoolingResponse,
    RerankItem,
    RerankResponse,
    RerankUsage,
    ScoreItem,
    ScoreResponse,
)
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.pooling import PoolingRequestOutput
from jaxpaged.serving.service import Service

Outputs = Sequence[PoolingRequestOutput]


def embeddings(service: Service, parsed: Parsed[EmbeddingRequest], outputs: Outputs) -> EmbeddingResponse:
    data = [Embedding(index=i, embedding=written(each.outputs.data, parsed.body)) for i, each in enumerate(outputs)]
    return answered(service, parsed, outputs, EmbeddingResponse, data)


def numbers(service: Service, parsed: Parsed[EmbeddingRequest], outputs: Outputs) -> PoolingResponse:
    data = [PooledItem(index=i, data=written(each.outputs.data, parsed.body)) for i, each in enumerate(outputs)]
    return answered(service, parsed, outputs, PoolingResponse, data)


def classes(service: Service, parsed: Parsed, outputs: Outputs) -> ClassifyResponse:
    labels, data = service.engine.input_processor.pooler.labels, []
    for index, probs in enumerate(each.outputs.data for each in outputs):
        label = labels[int(probs.argmax())]
        data.append(ClassItem(index=index, label=label, probs=probs.tolist(), num_classes=len(probs)))
    return answered(service, parsed, outputs, ClassifyResponse, data)


def scores(service: Service, parsed: ParsedPairs, outputs: Outputs) -> ScoreResponse:
    data = [ScoreItem(index=i, score=score) for i, score in enumerate(parsed.pairs.scores(outputs))]
    return answered(service, parsed, outputs, ScoreResponse, data)


def ranking(service: Service, parsed: ParsedPairs, outputs: Outputs) -> RerankResponse:
    """The best documents first."""
    body, found, usage = parsed.body, parsed.pairs.scores(outputs), usage_of(service, outputs)
    order = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n or None]
    shown = body.return_documents is not False
    results = [
        RerankItem(index=i, document=Document(body.texts[i]) if shown else None, relevance_score=found[i])
        for i in order
    ]
    counts = RerankUsage(usage.prompt_tokens, usage.total_tokens, usage.prompt_tokens_details)
    return RerankResponse(id=parsed.generation.request_id, model=parsed.model, usage=counts, results=results)


def answered[Answer: PooledResponse](
    service: Service, parsed: Parsed, outputs: Outputs, kind: type[Answer], data: list
) -> Answer:
    return kind(
        id=parsed.generation.request_id,
        created=int(time.time()),
        model=parsed.model,
        data=data,
        usage=usage_of(service, outputs),
    )


def written(numbers: np.ndarray, body: EmbeddingRequest) -> list[float] | str:
    """The numbers as JSON has them: a list, or little-endian float32 in base64, in a third of the bytes."""
    data = np.asarray(numbers, "<f4")
    return base64.b64encode(data.tobytes()).decode() if body.encoding_format == "base64" else data.tolist()


def usage_of(service: Service, outputs: Sequence[PoolingRequestOutput]) -> Usage:
    """Tokens of all prompts; nothing is generated."""
    count = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = PromptTokensDetails(cached) if service.options.enable_prompt_tokens_details else None
    return Usage(count, count, 0, details)
