"""What the endpoints for pooling take and give. Names are those of OpenAI, Jina and vLLM."""

from typing import Any, Literal

import msgspec

from jaxpaged.entrypoints.http.openai.protocol import PromptTokensDetails, Usage


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What all of them take. None means the default."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    priority: int | None = 0
    request_id: str | None = None
    cache_salt: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    mm_processor_kwargs: Any = None
    messages: Any = None
    metadata: Any = None
    session_id: Any = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Texts, token ids, or lists of either. `dimensions` cuts the vectors, where the model was trained for it."""

    input: str | list[str | int | list[int]] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class PoolRequest(EmbeddingRequest, kw_only=True):
    """The same, and what is wanted of the model, where the client wants to be sure: "embed", "classify" or "score".
    With `data` in place of `input` an I/O processor is asked, and with it the task may be "plugin"."""

    task: str | None = None
    data: Any = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """Texts, token ids, or lists of either."""

    input: str | list[str | int | list[int]] | None = None


class Document(msgspec.Struct):
    """A text, as some clients send it."""

    text: str


class ScoreRequest(PoolingFields, kw_only=True):
    """Texts to compare, under one of four pairs of names: one with many, or one by one."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Documents to order by how well they fit the query. `top_n` keeps the best; 0: all."""

    query: str
    documents: list[str | Document]
    top_n: int | None = 0
    return_documents: bool | None = True
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    instruction: str | None = None

    @property
    def texts(self) -> list[str]:
        return [each.text if isinstance(each, Document) else each for each in self.documents]


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or little-endian float32 in base64."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class PooledItem(msgspec.Struct, kw_only=True):
    """One result of `/pooling`."""

    index: int
    object: str = "pooling"
    data: list[float] | str


class ClassItem(msgspec.Struct, kw_only=True):
    """The most likely label of one input, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ScoreItem(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class PooledResponse(msgspec.Struct, kw_only=True):
    """What all responses have but those of `/rerank`."""

    id: str
    object: str = "list"
    created: int
    model: str


class EmbeddingResponse(PooledResponse, kw_only=True):
    """A vector per input, in order."""

    data: list[Embedding]
    usage: Usage


class PoolingResponse(PooledResponse, kw_only=True):
    """The numbers of every input, in order."""

    data: list[PooledItem]
    usage: Usage


class ProcessedResponse(msgspec.Struct, kw_only=True):
    """What an I/O processor answers."""

    request_id: str
    created_at: int
    data: Any


class ClassifyResponse(PooledResponse, kw_only=True):
    """A label per input, in order."""

    data: list[ClassItem]
    usage: Usage


class ScoreResponse(PooledResponse, kw_only=True):
    """A score per pair, in order."""

    data: list[ScoreItem]
    usage: Usage


class RerankUsage(msgspec.Struct):
    """Tokens of the query and of all documents."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class RerankItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document and its score; `index` is its place in the request."""

    index: int
    document: Document | None = None
    relevance_score: float


class RerankResponse(msgspec.Struct, kw_only=True):
    """The best documents first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankItem]
