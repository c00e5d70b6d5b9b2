"""What `/v1/responses` takes, and which of it cannot be served.

Types are checked when a body is decoded, ranges of sampling parameters by `SamplingParams`. This module knows neither
input items nor how anything is answered.
"""

from typing import Any, Literal

import msgspec

from jaxpaged.entrypoints.http.body import check_depth
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.sampling_fields import TRANSFER_REFUSALS, EngineFields, check_refusals, check_stop

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
"""Values of `include`. Thinking is never encrypted: its text is in the items, so clients can send it back without a
store. The others are about tools and media that are not served, so there is nothing that they could include."""

REFUSALS = {
    "conversation": "Conversations are not kept; previous_response_id goes on from a response",
    "prompt": "This server has no prompt templates",
    "context_management": "Contexts are not compacted",
    "moderation": "Nothing is moderated",
    **TRANSFER_REFUSALS,
    "enable_response_messages": "Responses have items, and no messages",
    "previous_input_messages": "Give earlier messages as input",
    "max_tokens": "It is called max_output_tokens here",
    "max_completion_tokens": "It is called max_output_tokens here",
    "response_format": "It is called text.format here",
    "messages": "They are called input here",
}
"""Field -> why no value of it is served. The last ones are for clients that mistake this API for another."""

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


class TextOptions(msgspec.Struct):
    """What the answer's text must look like."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    """How the model should think."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct):
    """What a stream tells besides its events."""

    include_obfuscation: bool | None = None


class ResponsesRequest(EngineFields, kw_only=True):
    """An input to answer. None means the default. Of the fields in `EngineFields`, most are vLLM's and not OpenAI's."""

    input: str | list[dict[str, Any]]
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
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
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


def check(wanted: ResponsesRequest) -> None:
    """Raise HttpError 400 for fields that cannot be honoured, or contradict each other."""
    check_refusals(wanted, REFUSALS)
    if wanted.n not in (None, 1):
        raise HttpError(400, "n is given. A response is one answer, so leave it out.", "n")
    check_metadata(wanted.metadata)
    check_logprobs(wanted)
    check_way_to_answer(wanted)
    check_style(wanted)
    for name in ("input", "tools", "tool_choice", "structured_outputs", "chat_template_kwargs"):
        check_depth(name, getattr(wanted, name))
    if wanted.text is not None:
        check_depth("text", wanted.text.format)
    check_stop("stop", wanted.stop)
    if wanted.max_tool_calls is not None and wanted.max_tool_calls < 1:
        raise HttpError(400, f"max_tool_calls is {wanted.max_tool_calls}; it must be at least 1.", "max_tool_calls")


def check_way_to_answer(wanted: ResponsesRequest) -> None:
    """Streams, the background, and what is kept."""
    if wanted.background and wanted.store is False:
        raise HttpError(
            400, "background is true, but store is false, so nobody could ask for the response. Leave out store.",
            "background",
        )  # fmt: skip
    if wanted.stream_options is not None and not wanted.stream:
        raise HttpError(400, "stream_options is given, but stream is not true. Leave it out.", "stream_options")
    if wanted.stream_options is not None and wanted.stream_options.include_obfuscation:
        raise HttpError(
            400, "stream_options.include_obfuscation is true, but events are not padded. Leave it out.",
            "stream_options",
        )  # fmt: skip
    if wanted.service_tier not in (None, *SERVICE_TIERS):
        raise HttpError(
            400, f"service_tier is {wanted.service_tier!r}; it must be one of {', '.join(SERVICE_TIERS)}.",
            "service_tier",
        )  # fmt: skip


def check_style(wanted: ResponsesRequest) -> None:
    """What clients wish of the text and of the thinking, where this server can only give what the model gives."""
    if wanted.text is not None and wanted.text.verbosity not in (None, "medium"):
        raise HttpError(
            400, f"text.verbosity is {wanted.text.verbosity!r}, but the model writes as it does. Leave it out.",
            "text.verbosity",
        )  # fmt: skip
    reasoning = wanted.reasoning or ReasoningOptions()
    for name in ("summary", "generate_summary"):
        value = getattr(reasoning, name)
        if value not in (None, "auto"):
            raise HttpError(
                400, f"reasoning.{name} is {value!r}, but thinking is given as it is, in no other form. Use 'auto', or "
                "leave it out.", f"reasoning.{name}",
            )  # fmt: skip


def check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise HttpError(400, f"metadata has {len(metadata)} entries; at most {MAX_METADATA} are kept.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise HttpError(
                400, f"metadata has an entry of {len(key)} and {len(value)} characters; its key may have "
                f"{MAX_METADATA_KEY} and its value {MAX_METADATA_VALUE}. Shorten it.", "metadata",
            )  # fmt: skip


def check_logprobs(wanted: ResponsesRequest) -> None:
    for value in wanted.include or ():
        if value not in INCLUDABLE:
            raise HttpError(400, f"include has {value!r}; it may have {', '.join(INCLUDABLE)}.", "include")
    top = wanted.top_logprobs
    if top is None:
        return
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise HttpError(400, f"top_logprobs is {top}; it must be from 0 to {MAX_TOP_LOGPROBS}.", "top_logprobs")
    if top and not wanted.wants_logprobs:
        raise HttpError(400, f"top_logprobs is {top}, but include does not have {LOGPROBS!r}. Add it.", "top_logprobs")
