"""What `/v1/completions` takes and gives."""

from typing import Any

import msgspec

from jaxpaged.entrypoints.http.openai.fields import GenerationFields
from jaxpaged.entrypoints.http.openai.logprobs import CompletionLogprobs
from jaxpaged.entrypoints.http.openai.usage import Usage
from jaxpaged.entrypoints.http.service import SYSTEM_FINGERPRINT
from jaxpaged.messages import Logprob

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields, kw_only=True):
    """A prompt to continue: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sequence. With several prompts `index` is prompt * n + sequence."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """All sequences of a request."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = SYSTEM_FINGERPRINT
    kv_transfer_params: dict[str, Any] | None = None


class CompletionStreamChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New text of one sequence. Ids are there when they were asked for, `stop_reason` with the last chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
