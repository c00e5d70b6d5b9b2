"""What `/v1/messages` and `/v1/messages/count_tokens` take and give, and the events of a streamed response: each has
its name, and data with the same `type`.

Fields of blocks and tools that are not here, such as `cache_control`, are let through: prompts are cached by
themselves. This module knows no endpoint.
"""

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, tag="text", tag_field="type"):
    """A text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking", tag_field="type"):
    """What the model thought before it answered. `signature` is a digest of it; nobody looks at one that returns."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag="redacted_thinking", tag_field="type"):
    """Thinking of another service that nobody can read; it is left out."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use", tag_field="type"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ImageSource(msgspec.Struct):
    """A picture in base64 with its media type, or a URL of one. `file`, an upload, is refused."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(msgspec.Struct, tag="image", tag_field="type"):
    """A picture; refused by models that take text only."""

    source: ImageSource | None = None


class DocumentBlock(msgspec.Struct, tag="document", tag_field="type"):
    """A document, which is refused."""

    source: Any = None


class ToolResultBlock(msgspec.Struct, tag="tool_result", tag_field="type"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


InputBlock = (
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock
)
OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class InputMessage(msgspec.Struct):
    """One turn. Several turns of the same role after each other count as one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class MessagesTool(msgspec.Struct):
    """A tool that the client runs. `input_schema` is a JSON schema of an object."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class MessagesToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Whether tools are called: as the model likes, at least one, the one of this `name`, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks before it answers. `budget_tokens` is the limit of that where the model's vocabulary has
    tokens around thinking, and a target elsewhere. Thinking is shown as it is, or omitted."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """JSON that this schema allows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How much effort the model makes, where its chat template has a word for it, and what its response looks like."""

    effort: str | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct):
    """What is to be taken out of the messages. Earlier thinking is left out or not as the chat template has it."""

    type: str


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """How the messages are to be shortened."""

    edits: list[ContextEdit] | None = None


class MessagesPrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What becomes the prompt. A last turn of the assistant is the beginning of the response."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None
    thread: Any = None
    context_management: ContextManagement | None = None
    speed: Any = None
    inference_geo: Any = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_control: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessagesRequest(MessagesPrompt, kw_only=True):
    """A conversation to go on with."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = 0


class MessagesUsage(msgspec.Struct):
    """Tokens read and written. Those that came from the prefix cache are told apart where the server reports them."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesResponse(msgspec.Struct, kw_only=True):
    """The response. `stop_reason` is null while it streams."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensRequest(MessagesPrompt, kw_only=True):
    """A conversation whose prompt is counted. What is only about the response may stand beside it."""

    max_tokens: Any = None
    stop_sequences: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    metadata: Any = None
    cache_salt: Any = None
    priority: Any = None


class CountTokensResponse(msgspec.Struct):
    """How long the prompt is."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag="message_start"):
    """The message without its content."""

    message: MessagesResponse


class BlockStart(msgspec.Struct, tag="content_block_start"):
    """A block without its content."""

    index: int
    content_block: OutputBlock


class TextDelta(msgspec.Struct, tag="text_delta"):
    """A piece of text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag="thinking_delta"):
    """A piece of thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag="signature_delta"):
    """The digest of the thinking, at its end."""

    signature: str


class InputJsonDelta(msgspec.Struct, tag="input_json_delta"):
    """A piece of a call's input, which is JSON once they are joined."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag="content_block_delta"):
    """What a block goes on with."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, tag="content_block_stop"):
    """A block is complete."""

    index: int


class Ending(msgspec.Struct):
    """How the message ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag="message_delta"):
    """The end of the message, with the tokens of all of it."""

    delta: Ending
    usage: MessagesUsage


class MessageStop(msgspec.Struct, tag="message_stop"):
    """Nothing comes after it."""


class Ping(msgspec.Struct, tag="ping"):
    """A sign of life."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
