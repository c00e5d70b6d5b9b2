"""The bodies of the endpoints that pool as what the engine is to do; what cannot be is refused by its field."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.entrypoints.http.openai.fields import check_given
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.pooling import Pairs, PoolRequest, check_count, pooler_of, prepare_inputs, prepare_pairs
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

PAIRS_OF_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def check_fields(body: PoolingFields) -> None:
    """Raise ServingError for what cannot be honoured."""
    if body.messages is not None:
        raise ServingError("messages is given, but only texts and token ids are pooled. Use input.", "messages")
    if body.embed_dtype not in (None, "float32"):
        raise ServingError(f"embed_dtype is {body.embed_dtype!r}; only float32 is given.", "embed_dtype")
    if body.endianness not in (None, "native", "little"):
        raise ServingError(f"endianness is {body.endianness!r}; vectors are little-endian.", "endianness")
    if body.mm_processor_kwargs is not None:
        raise ServingError(
            "mm_processor_kwargs is given, but only text is pooled. Leave it out.", "mm_processor_kwargs"
        )


def inputs_of(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The inputs of a request, each as text or token ids. Raises ServingError for a mixture and for too many."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ServingError("input is an empty list. Give at least one text.", "input")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise ServingError("input mixes texts, ids and lists of ids. Give a list of one kind.", "input")
    if kinds == {int}:
        return [given]
    check_count("input", len(given))
    return given


def texts_of(body: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """(names, first texts, second texts) of the one pair of fields that is given. Raises ServingError."""
    given = {name for pair in PAIRS_OF_FIELDS for name in pair if getattr(body, name) is not None}
    for names in PAIRS_OF_FIELDS:
        if given == set(names):
            first, second = (as_list(getattr(body, name)) for name in names)
            return names, first, second
    raise ServingError(
        f"Given are {', '.join(sorted(given)) or 'no texts'}. Give text_1 and text_2, queries and documents, "
        "queries and items, or data_1 and data_2.",
        sorted(given)[0] if given else "text_1",
    )


def as_list(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def check_rerank(body: RerankRequest) -> None:
    """Raise ServingError for what this endpoint cannot do."""
    if body.top_n is not None and body.top_n < 0:
        raise ServingError(f"top_n is {body.top_n}; it must be at least 0, which means all.", "top_n")
    for name in ("max_tokens_per_doc", "max_tokens_per_query", "instruction"):
        if getattr(body, name) not in (None, 0, ""):
            raise ServingError(f"{name} is given, but is not supported. Use truncate_prompt_tokens.", name)


@dataclass(frozen=True, kw_only=True)
class ParsedPairs(Parsed[ScoreRequest | RerankRequest]):
    """Texts to score by pairs."""

    pairs: Pairs


def parse_inputs(
    task: str | None, service: Service, body: EmbeddingRequest | ClassifyRequest, context: RequestContext
) -> Parsed[EmbeddingRequest | ClassifyRequest]:
    """`task` None: whatever the model does. Raises ServingError and RequestError for what cannot be."""
    pooler_of(service, task)
    check_fields(body)
    check_given(body, "input")
    inputs, request = inputs_of(body.input), request_of(body, "input")
    own_task = getattr(body, "task", None)
    return Parsed(body, context.model, prepare_inputs(service, request, inputs, context, task, own_task))


def parse_score(service: Service, body: ScoreRequest, context: RequestContext) -> ParsedPairs:
    """Raises ServingError and RequestError for what cannot be."""
    return parse_pairs(service, body, context, *texts_of(body))


def parse_rerank(service: Service, body: RerankRequest, context: RequestContext) -> ParsedPairs:
    """Raises ServingError and RequestError for what cannot be."""
    check_rerank(body)
    return parse_pairs(service, body, context, ("query", "documents"), [body.query], body.texts)


def parse_pairs(
    service: Service,
    body: ScoreRequest | RerankRequest,
    context: RequestContext,
    names: tuple[str, str],
    first: list[str],
    second: list[str],
) -> ParsedPairs:
    pooler_of(service)
    check_fields(body)
    generation, pairs = prepare_pairs(service, request_of(body, names[1]), names, (first, second), context)
    return ParsedPairs(body, context.model, generation, pairs=pairs)


def request_of(body: PoolingFields, field: str) -> PoolRequest:
    """What the body says besides the inputs, which are in `field`."""
    return PoolRequest(
        field=field,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        use_activation=body.use_activation,
        normalize=body.normalize,
        dimensions=getattr(body, "dimensions", None),
    )
