"""How an output is read: results of the engine become pieces of content, of thinking and of tool calls, and an end.

`Reading` says how the outputs of one request are read; an `OutputReader` reads one of its `n` sequences, as new text
comes or all at once. This module knows no API: what the pieces look like to a client is for each endpoint to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.parsing.deltas import Delta, ParsedMessage, joined
from jaxpaged.parsing.output import ToolSchemas
from jaxpaged.parsing.parser import BUILT_IN, Formats, make_parser

ANY_CALLS = "*"
"""`Reading.forced` of an output that is a list of calls."""


@dataclass(frozen=True)
class Reading:
    """How the outputs of one request are read. By default all text is content.

    `tools`: name -> JSON schema of the parameters. `forced`: the output is the arguments of the tool of this name, or
    with "*" a list of calls, as a grammar makes the model write them. `parallel` False keeps only the first call,
    `include_reasoning` False leaves the thinking out. `shaped`: the content has a shape, to which white space after the
    thinking does not belong. `formats`: those that the parsers' names may mean.
    """

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: ToolSchemas = MappingProxyType({})
    forced: str | None = None
    parallel: bool = True
    include_reasoning: bool = True
    shaped: bool = False
    formats: Formats = BUILT_IN

    @property
    def finds_markers(self) -> bool:
        """Whether the text must come with special tokens, since some of them may be markers."""
        return self.tool_parser is not None or self.reasoning_parser is not None

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return not self.finds_markers and self.forced is None


@dataclass(frozen=True)
class OutputPart:
    """What a result says of one output. `finish_reason` is that of clients: "tool_calls" when it ends with calls."""

    deltas: Sequence[Delta]
    finish_reason: str | None
    stop_reason: int | str | None

    @property
    def message(self) -> ParsedMessage:
        """The deltas as one message: the whole of an output that was read at once."""
        return joined(self.deltas)


class OutputReader:
    """Reads one sequence that answers a prompt with this `ending`, as `TokenPrompt` has it."""

    def __init__(self, reading: Reading, ending: str | None):
        self._reading = reading
        self._has_calls = False
        self._thinking: list[str] = []
        self._begins_answer = False  # thinking came, and nothing of the shaped answer yet
        self._parser = None
        self.is_plain = reading.is_plain  # all text is content
        if not reading.is_plain:
            self._parser = make_parser(
                reading.tool_parser,
                reading.reasoning_parser,
                tools=reading.tools,
                ending=ending or "",
                forced=reading.forced,
                formats=reading.formats,
            )

    def read(self, completion: CompletionOutput) -> OutputPart:
        """The next result: its text is what is new since the last one, so a final result alone has all of it."""
        return OutputPart(self._deltas(completion), self._finish_reason(completion), completion.stop_reason)

    @property
    def thinking(self) -> str:
        """What was read of thinking so far, wanted or not."""
        return "".join(self._thinking)

    def _deltas(self, completion: CompletionOutput) -> list[Delta]:
        if self._parser is None:
            return [Delta(content=completion.text)] if completion.text else []
        deltas = self._parser.push(completion.text)
        if completion.finish_reason is not None:
            deltas += self._parser.finish()
        self._has_calls = self._has_calls or any(delta.tool_call for delta in deltas)
        self._thinking += [delta.reasoning for delta in deltas if delta.reasoning]
        if self._reading.shaped and self._reading.reasoning_parser is not None:
            deltas = self._without_space(deltas)
        return [delta for delta in deltas if self._is_wanted(delta)]

    def _without_space(self, deltas: list[Delta]) -> list[Delta]:
        """Without the white space between the thinking and what comes after it."""
        kept = []
        for delta in deltas:
            if delta.reasoning is not None:
                self._begins_answer = True
            elif self._begins_answer and delta.content is not None:
                delta = Delta(content=delta.content.lstrip())
                self._begins_answer = not delta.content
            if delta.content != "":
                kept.append(delta)
        return kept

    def _is_wanted(self, delta: Delta) -> bool:
        if delta.tool_call is not None:
            return self._reading.parallel or delta.tool_call.index == 0
        return delta.reasoning is None or self._reading.include_reasoning

    def _finish_reason(self, completion: CompletionOutput) -> str | None:
        """A call of the one function that the client named is no decision of the model's, and ends with "stop"."""
        asked_for = self._reading.forced in (None, ANY_CALLS)
        if completion.finish_reason == "stop" and self._has_calls and asked_for:
            return "tool_calls"
        return completion.finish_reason


class UsageCounter:
    """Adds up results: prompts once each, and new or final tokens of every sequence.

    Not `with_cached`: clients hear nothing of prompt tokens that were cached. `media_tokens`: of all
    prompts, by modality.
    """

    def __init__(self, with_cached: bool, media_tokens: Mapping[str, int] = MappingProxyType({})):
        self._with_cached, self.media_tokens = with_cached, media_tokens
        self._prompts: dict[int, tuple[int, int]] = {}  # prompt -> its tokens, and those of them that were cached
        self.num_completion_tokens = 0

    def add(self, number: int, output: RequestOutput, num_dropped: int = 0) -> None:
        """Count a result of prompt `number`, without `num_dropped` tokens that the client does not get."""
        if number not in self._prompts:
            self._prompts[number] = (len(output.prompt_token_ids), output.num_cached_tokens or 0)
        for each in output.outputs:
            self.num_completion_tokens += len(each.token_ids)
        self.num_completion_tokens -= num_dropped

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for count, _ in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int | None:
        return None if not self._with_cached else sum(cached for _, cached in self._prompts.values())
