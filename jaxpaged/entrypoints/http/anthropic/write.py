"""Results of the engine as what `/v1/messages` answers: the whole message, or the events of a stream.

What the model wrote comes in blocks: text, thinking and calls. Message and stream come from the same deltas, which are
cut into blocks in the same way: a block lasts as long as deltas are of its kind.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from jaxpaged.entrypoints.http.anthropic.errors import messages_error
from jaxpaged.entrypoints.http.anthropic.protocol import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessagesRequest,
    MessagesResponse,
    MessageStart,
    MessageStop,
    MessagesUsage,
    OutputBlock,
    Ping,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from jaxpaged.entrypoints.http.errors import status_of
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.messages import RequestOutput
from jaxpaged.parsing.deltas import Delta
from jaxpaged.serving.errors import RETRY_SECONDS, ErrorKind, ServingError
from jaxpaged.serving.output_reader import OutputPart, UsageCounter
from jaxpaged.serving.service import Service

ENCODER = msgspec.json.Encoder()
PIECES = {"text": TextDelta, "thinking": ThinkingDelta, "tool_use": InputJsonDelta}
"""Kind of a block -> what its pieces are."""


def answer(service: Service, parsed: Parsed[MessagesRequest], outputs: Sequence[RequestOutput]) -> MessagesResponse:
    """The whole of it: `outputs` is the last result of the one prompt."""
    [output], counter = outputs, UsageCounter(service.options.enable_prompt_tokens_details)
    counter.add(0, output)
    part = parsed.new_reader().read(output.outputs[0])
    content = content_of(part.deltas)
    has_calls = any(isinstance(block, ToolUseBlock) for block in content)
    return message(parsed, counter, content, ending(parsed, part, counter, has_calls))


class MessageWriter:
    """Writes a stream: its first events open the message, and those of the last result close it."""

    def __init__(self, service: Service, parsed: Parsed[MessagesRequest]):
        self._parsed = parsed
        self._counter = UsageCounter(service.options.enable_prompt_tokens_details)
        self._reader = parsed.new_reader()
        self._told = MessageStream()
        self._begun = self._has_calls = False

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Events of a new result. Raises ServingError when the request was aborted."""
        self._counter.add(number, output)
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += self._told.start(message(self._parsed, self._counter, []))
        part = self._reader.read(output.outputs[0])
        self._has_calls = self._has_calls or any(delta.tool_call is not None for delta in part.deltas)
        events += self._told.of(part.deltas)
        if part.finish_reason is not None:
            end = ending(self._parsed, part, self._counter, self._has_calls)
            events += self._told.end(end, usage_of(self._counter))
        return b"".join(map(frame, events))

    def end(self) -> bytes:
        """Nothing: the last result has closed the message."""
        return b""

    def late_error(self, error: ServingError) -> bytes:
        """An error in a stream that has begun: it takes the place of the rest."""
        return named("error", ENCODER.encode(messages_error(status_of(error), error.message)))


# ---- the message


def message(
    parsed: Parsed[MessagesRequest], counter: UsageCounter, content: list, end: Ending | None = None
) -> MessagesResponse:
    """The message with this content; without an end it is the beginning of a stream."""
    return MessagesResponse(
        id=parsed.generation.request_id,
        model=parsed.model,
        content=content,
        stop_reason=end.stop_reason if end else None,
        stop_sequence=end.stop_sequence if end else None,
        usage=usage_of(counter),
    )


def ending(parsed: Parsed[MessagesRequest], part: OutputPart, counter: UsageCounter, has_calls: bool) -> Ending:
    """How the message ended.

    Raises ServingError when the request was aborted: there is no word for a response that the server did not end.
    """
    stop_sequence = part.stop_reason if isinstance(part.stop_reason, str) else None
    if part.finish_reason == "length":
        room_left = counter.num_completion_tokens < parsed.body.max_tokens
        return Ending("model_context_window_exceeded" if room_left else "max_tokens", stop_sequence)
    if part.finish_reason not in ("stop", "tool_calls"):
        raise ServingError(
            "The request was aborted on the server. Send it again.",
            kind=ErrorKind.UNAVAILABLE,
            retry_after=RETRY_SECONDS,
        )
    if stop_sequence is not None:
        return Ending("stop_sequence", stop_sequence)
    return Ending("tool_use" if has_calls else "end_turn", None)


def usage_of(counter: UsageCounter) -> MessagesUsage:
    """Tokens from the prefix cache do not count as input; without details they are not told apart."""
    cached = counter.num_cached_tokens or 0
    return MessagesUsage(
        counter.num_prompt_tokens - cached, counter.num_completion_tokens, cache_read_input_tokens=cached
    )


# ---- its blocks


@dataclass
class OpenBlock:
    """A block while it is being written."""

    kind: str  # "text", "thinking" or "tool_use"
    call: int | None = None  # number of the call
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    def belongs(self, delta: Delta) -> bool:
        call = delta.tool_call
        return kind_of(delta) == self.kind and (call is None or call.index == self.call)

    def begun(self) -> OutputBlock:
        """The block before its first piece."""
        match self.kind:
            case "thinking":
                return ThinkingBlock("", "")
            case "tool_use":
                return ToolUseBlock(self.id, self.name, {})
        return TextBlock("")

    def ended(self) -> OutputBlock:
        """The whole block."""
        text = "".join(self.pieces)
        match self.kind:
            case "thinking":
                return ThinkingBlock(text, signature(text))
            case "tool_use":
                return ToolUseBlock(self.id, self.name, input_of(text))
        return TextBlock(text)


def kind_of(delta: Delta) -> str:
    if delta.tool_call is not None:
        return "tool_use"
    return "text" if delta.reasoning is None else "thinking"


def text_of(delta: Delta) -> str:
    """The piece of text, of thinking, or of a call's input as JSON."""
    if delta.tool_call is not None:
        return delta.tool_call.arguments
    return (delta.content if delta.reasoning is None else delta.reasoning) or ""


def open_block(delta: Delta) -> OpenBlock:
    call = delta.tool_call
    return OpenBlock("tool_use", call.index, call.id or "", call.name or "") if call else OpenBlock(kind_of(delta))


def signature(thinking: str) -> str:
    """Clients leave out thinking without a signature. There is nothing to keep secret, so it is a digest."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def input_of(arguments: str) -> dict:
    """A call's input; an empty object when the model was cut off or wrote no JSON object."""
    try:
        return msgspec.json.decode(arguments, type=dict)
    except msgspec.DecodeError:
        return {}


def content_of(deltas: Iterable[Delta]) -> list[OutputBlock]:
    """The blocks that deltas add up to; a response without any is an empty text."""
    blocks: list[OpenBlock] = []
    for delta in deltas:
        if not blocks or not blocks[-1].belongs(delta):
            blocks.append(open_block(delta))
        blocks[-1].pieces.append(text_of(delta))
    return [block.ended() for block in blocks] or [TextBlock("")]


# ---- its events


class MessageStream:
    """Turns the deltas of one response into events."""

    def __init__(self) -> None:
        self._block: OpenBlock | None = None
        self._index = -1  # of the newest block

    def start(self, message: MessagesResponse) -> Iterator[Event]:
        """`message` has no content yet."""
        yield MessageStart(message)
        yield Ping()

    def of(self, deltas: Iterable[Delta]) -> Iterator[Event]:
        for delta in deltas:
            if self._block is None or not self._block.belongs(delta):
                yield from self._close()
                yield from self._open(open_block(delta))
            if piece := text_of(delta):
                self._block.pieces.append(piece)
                yield BlockDelta(self._index, PIECES[self._block.kind](piece))

    def end(self, ending: Ending, usage: MessagesUsage) -> Iterator[Event]:
        """The last block's end and the message's; a response without any block gets an empty text."""
        if self._index < 0:
            self._index = 0
            yield BlockStart(0, TextBlock(""))
            yield BlockStop(0)
        yield from self._close()
        yield MessageDelta(ending, usage)
        yield MessageStop()

    def _open(self, block: OpenBlock) -> Iterator[Event]:
        self._block = block
        self._index += 1
        yield BlockStart(self._index, block.begun())

    def _close(self) -> Iterator[Event]:
        if self._block is None:
            return
        if self._block.kind == "thinking":
            yield BlockDelta(self._index, SignatureDelta(signature("".join(self._block.pieces))))
        self._block = None
        yield BlockStop(self._index)


def frame(event: Event) -> bytes:
    """The bytes of an event."""
    return named(event.__struct_config__.tag, ENCODER.encode(event))


def named(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
