"""What OpenAI's API takes and gives: completions, chats, the chunks of their streams, tokens, and usage."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxpaged import __version__
from jaxpaged.entrypoints.for_trainers import for_trainers
from jaxpaged.entrypoints.http.openai.fields import GenerationFields
from jaxpaged.entrypoints.http.openai.logprobs import ChatLogprobs, CompletionLogprobs
from jaxpaged.messages import CompletionOutput, Logprob
from jaxpaged.serving.output_reader import UsageCounter


class PromptTokensDetails(msgspec.Struct, omit_defaults=True):
    """Prompt tokens that came from the prefix cache, and those of pictures and videos, as vLLM has it: `{"image":
    ...}`."""

    cached_tokens: int | None = None
    multimodal_tokens: dict[str, int] | None = None


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of the responses that were thinking."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all prompts and of all sequences of one HTTP request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None | msgspec.UnsetType = None
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def told_to_trainers(completion: CompletionOutput) -> dict[str, Any]:
    """More fields of a choice; none where engines tell trainers nothing, which are most."""
    if completion.sampling_mask is None and completion.routed_experts is None:
        return {}
    return for_trainers(completion)


def usage_of(counter: UsageCounter, in_stream: bool = False, num_thinking: int | None = None) -> Usage:
    """What was counted so far. In streams there are no nulls. `num_thinking` None: thinking is not looked for."""
    details = msgspec.UNSET if in_stream else None
    cached, media_tokens = counter.num_cached_tokens, counter.media_tokens
    if cached is not None or media_tokens:
        details = PromptTokensDetails(cached, dict(media_tokens) or None)
    prompt_tokens, completion_tokens = counter.num_prompt_tokens, counter.num_completion_tokens
    thinking = msgspec.UNSET
    if num_thinking is not None:
        thinking = CompletionTokensDetails(min(num_thinking, completion_tokens))
    return Usage(prompt_tokens, prompt_tokens + completion_tokens, completion_tokens, details, thinking)


SYSTEM_FINGERPRINT = f"jaxpaged-{__version__}"
DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat goes on to the end of the context."""


class Chunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a stream. Those with the usage, and with where a prompt is lent, have no choices."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[msgspec.Struct]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


# ---- completions


class CompletionRequest(GenerationFields, kw_only=True):
    """A prompt to continue: text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]] | None = None
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
    sampling_mask: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


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
    sampling_mask: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


# ---- chats


class Function(msgspec.Struct, omit_defaults=True):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool; functions are the only kind."""

    function: Function
    type: str = "function"


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    function: NamedFunction
    type: str = "function"


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """A conversation to go on with. `prediction` would only be about speed."""

    messages: list[dict[str, Any]]
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    return_prompt_text: bool | None = False
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    verbosity: Any = None
    prediction: Any = None
    web_search_options: Any = None

    @property
    def num_logprobs(self) -> int | None:
        """Candidates per token; None when no log probabilities were asked for."""
        if not self.logprobs:
            return None
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.top_logprobs or 0


class CalledFunction(msgspec.Struct):
    """The function that the model calls; `arguments` is what it wrote, JSON unless it was cut off."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct):
    """A call."""

    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    """The response. `tool_calls` is there only when there are some."""

    role: str
    content: str | None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    reasoning: str | None = None
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    sampling_mask: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """All responses to a conversation."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None
    system_fingerprint: str | None = SYSTEM_FINGERPRINT
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """The name, with a call's first piece, and a piece of the arguments."""

    name: str | None = None
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ChatToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of call number `index`. The first one has id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a response."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ChatToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatStreamChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """News of one response. Ids are there when they were asked for, `stop_reason` with the last chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | None = None
    sampling_mask: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    routed_experts: str | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(Chunk, kw_only=True, omit_defaults=True):
    """One event of a stream, with the prompt in the first one of a response where it was asked for."""

    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


# ---- tokens


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation. `add_special_tokens` is true for a text and false for a conversation by default."""

    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class TokenizeResponse(msgspec.Struct):
    """The ids. `token_strs` are the tokens as the vocabulary has them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids of the model's vocabulary."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids."""

    prompt: str
