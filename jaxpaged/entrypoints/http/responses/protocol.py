"""What `/v1/responses` takes and gives: the body, and the response with its items.

Types are checked when a body is decoded, ranges of sampling parameters by `SamplingParams`.
"""

import secrets
from typing import Any, Literal

import msgspec

from jaxpaged.entrypoints.http.openai.fields import EngineFields
from jaxpaged.entrypoints.http.openai.logprobs import TokenLogprob

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probabilities."""
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What the response's text must look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How the model should think."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells besides its events."""

    include_obfuscation: bool | None = None


class ResponsesRequest(EngineFields, kw_only=True):
    """An input to answer. None means the default. Of the fields in `EngineFields`, most are vLLM's and not OpenAI's."""

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None
    messages: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def new_id(kind: str) -> str:
    """An id that nobody guesses, such as `resp_...`."""
    return f"{kind}_{secrets.token_hex(24)}"


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message. `logprobs` has an entry per token where they were asked for."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model says to the user."""

    id: str
    status: ItemStatus = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's thinking, as it is: no summary is made of it, and it is not encrypted."""

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the client is asked to run. `call_id` is what its result must name."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: ItemStatus = "in_progress"


OutputItem = OutputMessage | ReasoningItem | FunctionCall


class InputTokensDetails(msgspec.Struct):
    """Input tokens that came from the prefix cache; 0 where the server does not tell."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Output tokens that were thinking."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of the prompt and of the output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""

    reason: str


class ResponseError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class Response(msgspec.Struct, kw_only=True):
    """A response, finished or under way, with the options under which it was made."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    kv_transfer_params: dict[str, Any] | None = None


class DeletedResponse(msgspec.Struct):
    """That a response is forgotten."""

    id: str
    object: str = "response"
    deleted: bool = True
