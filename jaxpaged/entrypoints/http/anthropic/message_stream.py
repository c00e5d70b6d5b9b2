"""Events of a streamed answer in their order: the message starts, its blocks come one after the other, it ends.

This module knows neither requests nor bytes.
"""

from collections.abc import Iterable, Iterator

from jaxpaged.entrypoints.http.anthropic.blocks import OpenBlock, open_block, signature, text_of
from jaxpaged.entrypoints.http.anthropic.events import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    Event,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    TextDelta,
    ThinkingDelta,
)
from jaxpaged.entrypoints.http.anthropic.protocol import MessagesResponse, MessagesUsage, TextBlock
from jaxpaged.parsing.deltas import Delta

PIECES = {"text": TextDelta, "thinking": ThinkingDelta, "tool_use": InputJsonDelta}
"""Kind of a block -> what its pieces are."""


class MessageStream:
    """Turns the deltas of one answer into events."""

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
        """The last block's end and the message's; an answer without any block gets an empty text."""
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
