"""The bodies of the endpoints that pool as what the engine is to do; what cannot be is refused by its field."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.engine.input.long_text import checked_length
from jaxpaged.engine.input.processor import NO_POOLING
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, cut_ids, text_ids
from jaxpaged.engine.pooling.scoring import paired
from jaxpaged.entrypoints.http.openai.fields import check_given
from jaxpaged.entrypoints.http.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.pooling import PoolingParams
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import GenerationRequest
from jaxpaged.serving.prompts import TokenPrompt, check_salt
from jaxpaged.serving.service import Service

MAX_INPUTS = 2048
"""Prompts of one HTTP request, as OpenAI has it."""
PAIRS_OF_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

Input = str | list[int] | tuple[str, str]


@dataclass(frozen=True)
class ParsedPairs(Parsed[ScoreRequest | RerankRequest]):
    """Pairs of texts, by their places among the first and the second texts. `classifies`: a prompt is a pair.

    If not, the prompts are the `num_first` first texts and the second ones, whose vectors are compared.
    """

    pairs: Sequence[tuple[int, int]] = ()
    num_first: int = 0
    classifies: bool = False


def parse_inputs(
    task: str | None, service: Service, body: EmbeddingRequest | ClassifyRequest, request_id: str, model: str
) -> Parsed[EmbeddingRequest | ClassifyRequest]:
    """`task` None: whatever the model does. Raises ServingError and RequestError for what cannot be."""
    pooler = pooler_of(service, task)
    check_fields(body)
    check_given(body, "input")
    params = PoolingParams(
        task=task or getattr(body, "task", None),
        dimensions=getattr(body, "dimensions", None),
        use_activation=body.use_activation,
        normalize=body.normalize,
    )
    pooler.check(params)
    return Parsed(body, model, pooled(service, inputs_of(body.input), body, "input", request_id, params))


def parse_score(service: Service, body: ScoreRequest, request_id: str, model: str) -> ParsedPairs:
    """Raises ServingError and RequestError for what cannot be."""
    return parse_pairs(service, body, request_id, model, *texts_of(body))


def parse_rerank(service: Service, body: RerankRequest, request_id: str, model: str) -> ParsedPairs:
    """Raises ServingError and RequestError for what cannot be."""
    check_rerank(body)
    return parse_pairs(service, body, request_id, model, ("query", "documents"), [body.query], body.texts)


def parse_pairs(
    service: Service,
    body: ScoreRequest | RerankRequest,
    request_id: str,
    model: str,
    names: tuple[str, str],
    first: list[str],
    second: list[str],
) -> ParsedPairs:
    pooler = pooler_of(service)
    check_fields(body)
    check_count(names[1], len(second))
    pairs = paired(first, second, names)
    classifies = pooler.convert == "classify"
    if classifies and pooler.width != 1:
        raise ServingError(f"This model has {pooler.width} labels, and a score is one number. Use /classify.", "model")
    params = PoolingParams(
        task="score" if classifies else "embed", use_activation=body.use_activation, normalize=body.normalize
    )
    pooler.check(params)
    given = [(first[i], second[j]) for i, j in pairs] if classifies else [*first, *second]
    generation = pooled(service, given, body, names[1], request_id, params)
    return ParsedPairs(body, model, generation, pairs=pairs, num_first=len(first), classifies=classifies)


def pooled(
    service: Service, inputs: Sequence[Input], body: PoolingFields, field: str, request_id: str, params: PoolingParams
) -> GenerationRequest:
    """What the engine is asked for, with inputs that the client gave in `field`."""
    names = {"prompt": field}
    with client_names(names):
        prompts = read_prompts(service, inputs, body, field)
    return GenerationRequest(request_id, prompts, params, body.priority or 0, names)


def pooler_of(service: Service, convert: str | None = None) -> Pooler:
    """What the engine gives. Raises ServingError when it was started to generate, or not to `convert`."""
    pooler = service.engine.input_processor.pooler
    if pooler is None:
        raise ServingError(f"T{NO_POOLING[1:]}", "model")
    if convert not in (None, pooler.convert):
        raise ServingError(f"This model was started to {pooler.convert}, not to {convert}. Ask another one.", "model")
    return pooler


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


def check_count(name: str, count: int) -> None:
    if count > MAX_INPUTS:
        raise ServingError(f"{name} has {count} entries; one request may have {MAX_INPUTS}. Send several.", name)


def read_prompts(service: Service, given: Sequence[Input], body: PoolingFields, name: str) -> list[TokenPrompt]:
    """Texts, ids or pairs of texts as token ids, cut as the request says. Takes long for long texts.

    Raises RequestError and ServingError.
    """
    check_salt(body.cache_salt)
    processor = service.engine.input_processor
    keep = check_keep(body.truncate_prompt_tokens, processor.max_model_len)
    special, from_left = body.add_special_tokens is not False, body.truncation_side == "left"

    def read(each: Input) -> TokenPrompt:
        if isinstance(each, list):
            ids = processor.parse(cut_ids(each, keep, from_left)).token_ids
        else:
            texts = each if isinstance(each, tuple) else (each,)
            if not all(texts):
                raise ServingError(f"{name} has an empty text. Give it at least one character.", name)
            if keep is None:
                for text in texts:
                    checked_length(processor.tokenizer, text, processor.max_model_len)
            ids = text_ids(processor.tokenizer, texts, keep, special, from_left)
        return TokenPrompt(ids, None, body.cache_salt)

    return [read(each) for each in given]


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
