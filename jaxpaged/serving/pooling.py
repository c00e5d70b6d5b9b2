"""Requests to a model that pools, in no protocol's words: inputs to pool, and pairs of texts to score.

Embedding models score by comparing vectors, classifiers by reading the pair.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxpaged.engine.input.processor import NO_POOLING
from jaxpaged.engine.input.tokenizer import checked_length
from jaxpaged.engine.pooling.pooler import Pooler
from jaxpaged.engine.pooling.prompts import check_keep, cut_ids, encoded_texts, told_types
from jaxpaged.engine.pooling.scoring import cosine, paired
from jaxpaged.pooling import PoolingParams, PoolingRequestOutput
from jaxpaged.serving.errors import ServingError, client_names
from jaxpaged.serving.generate import EngineRequest
from jaxpaged.serving.prompts import TokenPrompt, check_salt
from jaxpaged.serving.requests import RequestContext
from jaxpaged.serving.service import Service

MAX_INPUTS = 2048
"""Prompts of one request, as OpenAI has it."""

Input = str | list[int] | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class PoolRequest:
    """What a client says of any request to pool. `field`: what it calls the inputs. None means the default."""

    field: str
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    use_activation: bool | None = None
    normalize: bool | None = None
    dimensions: int | None = None


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts, by their places among the first and the second texts. `classifies`: a prompt is a pair.

    If not, the prompts are the `num_first` first texts and the second ones, whose vectors are compared.
    """

    pairs: Sequence[tuple[int, int]]
    num_first: int
    classifies: bool

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[float]:
        """The score of every pair: a classifier's own, or the cosine of two vectors."""
        vectors = [output.outputs.data for output in outputs]
        if self.classifies:
            return [float(vector[0]) for vector in vectors]
        return [cosine(vectors[i], vectors[self.num_first + j]) for i, j in self.pairs]


def prepare_inputs(
    service: Service,
    request: PoolRequest,
    inputs: Sequence[Input],
    context: RequestContext,
    convert: str | None = None,
    task: str | None = None,
) -> EngineRequest:
    """`convert`: what the model must have been started for. Raises ServingError and RequestError for what cannot be."""
    pooler = pooler_of(service, convert)
    params = PoolingParams(
        task=convert or task,
        dimensions=request.dimensions,
        use_activation=request.use_activation,
        normalize=request.normalize,
    )
    pooler.check(params)
    return pooled(service, inputs, request, params, context)


def prepare_pairs(
    service: Service, request: PoolRequest, names: tuple[str, str], texts: Sequence[list[str]], context: RequestContext
) -> tuple[EngineRequest, Pairs]:
    """Scores of the first and the second `texts`, which the client gave in fields of these `names`."""
    pooler = pooler_of(service)
    first, second = texts
    check_count(names[1], len(second))
    pairs = paired(first, second, names)
    classifies = pooler.convert == "classify"
    if classifies and pooler.width != 1:
        raise ServingError(f"This model has {pooler.width} labels, and a score is one number. Use /classify.", "model")
    params = PoolingParams(
        task="score" if classifies else "embed", use_activation=request.use_activation, normalize=request.normalize
    )
    pooler.check(params)
    given = [(first[i], second[j]) for i, j in pairs] if classifies else [*first, *second]
    return pooled(service, given, request, params, context), Pairs(pairs, len(first), classifies)


def pooled(
    service: Service, inputs: Sequence[Input], request: PoolRequest, params: PoolingParams, context: RequestContext
) -> EngineRequest:
    """What the engine is asked for."""
    names: Mapping[str, str] = MappingProxyType({"prompt": request.field})
    with client_names(names):
        prompts = read_inputs(service, inputs, request)
    return EngineRequest(
        context.request_id,
        prompts,
        params,
        request.priority,
        names,
        data_parallel_rank=context.data_parallel_rank,
        trace=context.trace,
        lora=context.lora,
    )


def pooler_of(service: Service, convert: str | None = None) -> Pooler:
    """What the engine gives. Raises ServingError when it was started to generate, or not to `convert`."""
    pooler = service.engine.input_processor.pooler
    if pooler is None:
        raise ServingError(f"T{NO_POOLING[1:]}", "model")
    if convert not in (None, pooler.convert):
        raise ServingError(f"This model was started to {pooler.convert}, not to {convert}. Ask another one.", "model")
    return pooler


def check_count(name: str, count: int) -> None:
    if count > MAX_INPUTS:
        raise ServingError(f"{name} has {count} entries; one request may have {MAX_INPUTS}. Send several.", name)


def read_inputs(service: Service, given: Sequence[Input], request: PoolRequest) -> list[TokenPrompt]:
    """Texts, ids or pairs of texts as token ids, cut as the request says. Takes long for long texts.

    Raises RequestError and ServingError.
    """
    check_salt(request.cache_salt)
    processor, name = service.engine.input_processor, request.field
    keep = check_keep(request.truncate_prompt_tokens, processor.max_model_len)
    special, from_left = request.add_special_tokens is not False, request.truncation_side == "left"

    def read(each: Input) -> TokenPrompt:
        types = None
        if isinstance(each, list):
            ids = processor.parse(cut_ids(each, keep, from_left)).token_ids
        else:
            texts = each if isinstance(each, tuple) else (each,)
            if not all(texts):
                raise ServingError(f"{name} has an empty text. Give it at least one character.", name)
            if keep is None:
                for text in texts:
                    checked_length(processor.tokenizer, text, processor.max_model_len)
            encoding = encoded_texts(processor.tokenizer, texts, keep, special, from_left)
            ids, types = encoding.ids, told_types(pooler_of(service), encoding)
        return TokenPrompt(ids, None, request.cache_salt, token_type_ids=types)

    return [read(each) for each in given]
