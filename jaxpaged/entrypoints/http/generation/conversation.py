"""A conversation of any API, and its parsing: the prompt, the sampling parameters, and how to read the answer.

What a request says of tools, of the answer's shape and of thinking meets here what the server knows of its model.
This module knows no API: endpoints bring a request into the form of `Conversation`, and name fields in errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.long_text import Truncation
from jaxpaged.entrypoints.http.generation.answer import ANY_CALLS, Reading
from jaxpaged.entrypoints.http.generation.prompts import PromptReader, TokenPrompt
from jaxpaged.entrypoints.http.generation.tool_use import WRITTEN, ToolUse, shape_or_calls
from jaxpaged.entrypoints.http.options import ServerOptions
from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.parsing.detect import tool_parser_of
from jaxpaged.parsing.parser import TOOL_FORMATS, reasoning_format_named
from jaxpaged.parsing.reasoning import ReasoningFormat
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams, Thinking
from jaxpaged.serving.errors import ServingError


@dataclass(frozen=True)
class AnswerFormats:
    """How the model writes calls and thinking; None: not known, or not to be looked for."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None


def answer_formats(options: ServerOptions, templates: ChatTemplates) -> AnswerFormats:
    """What the options say. Raises ConfigError when calls are to be found but no format is known."""
    tool_parser = options.tool_call_parser
    if options.enable_auto_tool_choice and tool_parser is None:
        template = templates.sources.get("tool_use", templates.sources.get("default", ""))
        tool_parser = tool_parser_of(template)
        if tool_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice is given, but the model's chat template does not show how it writes calls. "
                f"Add --tool-call-parser with one of {', '.join(sorted(TOOL_FORMATS))}."
            )
    return AnswerFormats(tool_parser, options.reasoning_parser)


@dataclass(frozen=True)
class Conversation:
    """A request of any API. `template` are further arguments of `InputProcessor.chat_prompt`, the tools among them.

    `shape` is what the answer must look like, where the client says so.
    """

    messages: list[dict[str, Any]]
    template: Mapping[str, Any] = MappingProxyType({})
    tool_use: ToolUse | None = None
    shape: StructuredOutputsParams | None = None
    include_reasoning: bool = True
    truncation: Truncation = field(default_factory=Truncation)
    add_special_tokens: bool = False
    cache_salt: str | None = None


@dataclass(frozen=True)
class ParsedConversation:
    """What the engine gets, and how its results are read."""

    prompt: TokenPrompt
    params: SamplingParams
    reading: Reading


def parse_conversation(
    conversation: Conversation, params: SamplingParams, formats: AnswerFormats, prompts: PromptReader
) -> ParsedConversation:
    """`params` are those of the client, to which shape and special tokens are added. Takes long for long conversations.

    Raises ServingError or RequestError; their parameters are "tool_choice" and "structured_outputs", and those of
    `PromptReader.read_chat`.
    """
    reading = reading_of(conversation, formats)
    shape = shape_of(conversation, reading.tool_parser)
    prompt = prompts.read_chat(
        conversation.messages,
        conversation.truncation,
        conversation.add_special_tokens,
        conversation.cache_salt,
        thinking_markers=thinking_markers(reading.reasoning_parser),
        **conversation.template,
    )
    params = params.clone()
    if reading.finds_markers:
        params.skip_special_tokens = False
    if shape is not None:
        params.structured_outputs = after_thinking(shape, reading.reasoning_parser, prompt.ending or "")
    return ParsedConversation(prompt, params, reading)


def reading_of(conversation: Conversation, formats: AnswerFormats) -> Reading:
    """Raises ServingError when the model may call tools but nobody knows how it would write that."""
    use = conversation.tool_use
    tool_parser, forced = None, None
    if use is not None and use.choice == "auto":
        tool_parser = formats.tool_parser
        if tool_parser is None:
            raise ServingError(
                "tool_choice is 'auto', as it is with tools unless something else is said, but this server does "
                "not look for calls. Start it with --enable-auto-tool-choice, or use 'required', a named function or "
                "'none'.",
                "tool_choice",
            )
    elif use is not None and use.is_forced:
        forced = ANY_CALLS if use.choice == "required" else use.name
    return Reading(
        tool_parser=tool_parser,
        reasoning_parser=formats.reasoning_parser,
        tools={} if use is None else use.schemas,
        forced=forced,
        parallel=use is None or use.parallel,
        include_reasoning=conversation.include_reasoning,
        shaped=conversation.shape is not None,
    )


def shape_of(conversation: Conversation, tool_parser: str | None) -> StructuredOutputsParams | None:
    """The client's, that of forced calls, or the client's beside free calls. Raises ServingError if it cannot be."""
    use, shape = conversation.tool_use, conversation.shape
    if use is None or use.choice == "none":
        return shape
    if shape is None:
        return use.forced_shape()
    either = None if tool_parser is None else shape_or_calls(shape, use, tool_parser)
    if either is None:
        raise ServingError(
            f"tool_choice is {use.choice!r}, but the answer must also have a shape of its own, in which no call "
            "can be written. Ask for one of the two, or set tool_choice to 'none'. Both are possible with 'auto' and "
            f"one of the tool call parsers {', '.join(sorted(WRITTEN))}.",
            "tool_choice",
        )
    return either


def after_thinking(
    shape: StructuredOutputsParams, reasoning_parser: str | None, ending: str
) -> StructuredOutputsParams:
    """The shape of an answer before which the model may think freely. `ending` is that of its prompt.

    Raises RequestError where that cannot be.
    """
    if reasoning_parser is None:
        return shape
    thinking = reasoning_format_named(reasoning_parser)
    if not isinstance(thinking, ReasoningFormat):
        raise RequestError(
            f"structured_outputs cannot be used: thinking in the format {reasoning_parser!r}, which this server looks "
            "for, has no one end after which an answer could begin. Leave it out.",
            "structured_outputs",
        )
    marks = Thinking(thinking.start, thinking.end, thinking.is_open_after(ending))
    return msgspec.structs.replace(shape, thinking=marks)


def thinking_markers(reasoning_parser: str | None) -> tuple[str, ...]:
    """The texts between which the model thinks, as far as a prompt may hold them."""
    found = None if reasoning_parser is None else reasoning_format_named(reasoning_parser)
    return (found.start, found.end) if isinstance(found, ReasoningFormat) else ()
