"""What requests give as prompts, as token ids: texts, ids, and conversations, with how the output of one is read.

What a request says of tools, of the output's shape and of thinking meets here what the server knows of its model.
Protocols bring a conversation into the form of `Conversation`, and name fields in errors. What is called here can take
long: it is called off the event loop where a request is not short.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from jaxpaged.engine.input.chat_template import ChatTemplates
from jaxpaged.engine.input.processor import InputProcessor
from jaxpaged.engine.input.tokenizer import Truncation
from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.messages import MultiModalFeature
from jaxpaged.multimodal.sources import KEYS, VIDEO_KEYS
from jaxpaged.parsing.detect import tool_parser_of
from jaxpaged.parsing.parser import BUILT_IN, Formats, reasoning_format_named
from jaxpaged.parsing.reasoning import ReasoningFormat
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams, Thinking
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.options import ServerOptions, check_formats
from jaxpaged.serving.output_reader import ANY_CALLS, Reading
from jaxpaged.serving.requests import check_depth
from jaxpaged.serving.tool_use import WRITTEN, ToolUse, shape_or_calls

NOTHING: Mapping[str, Any] = MappingProxyType({})
SALT_FORBIDDEN = "@/\\\0"
"""Characters that KV stores use to separate a salt from what follows it."""


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt in tokens. `text` is None when it was given as ids. `cache_salt` keeps its cached blocks to itself.
    `ending` is the part of a chat that its template wrote behind the last message, where that matters. `mm_features`
    are its pictures, processed. `token_type_ids`: of which text of a pair each token is, for models that are told."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    ending: str | None = None
    mm_features: Sequence[MultiModalFeature] = ()
    token_type_ids: list[int] | None = None

    def for_engine(self) -> dict[str, Any]:
        others = {"cache_salt": self.cache_salt, "ending": self.ending, "mm_features": self.mm_features or None}
        others["token_type_ids"] = self.token_type_ids
        others = {name: value for name, value in others.items() if value is not None}
        return {"prompt": self.text, "prompt_token_ids": self.token_ids, **others}

    @property
    def media_tokens(self) -> Counter[str]:
        """Of the tokens those in whose place embeddings of pictures or videos stand, by modality."""
        tokens: Counter[str] = Counter()
        for feature in self.mm_features:
            tokens[feature.modality] += feature.num_embeds
        return tokens


class PromptReader:
    """Makes prompts of what requests hold. All methods raise RequestError or ServingError when that is at fault.

    `template_variables` are for chats that bring none of the same name.
    """

    def __init__(self, processor: InputProcessor, template_variables: Mapping[str, Any] = NOTHING):
        self._processor = processor
        self._template_variables = template_variables

    def read(
        self,
        prompts: Sequence[str | list[int]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        *,
        most: int | None = None,
    ) -> list[TokenPrompt]:
        """Texts or token ids, of at most `most` tokens, as a rule what the model takes."""
        check_salt(cache_salt)
        return [self._read(each, truncation, add_special_tokens, cache_salt, most) for each in prompts]

    def _read(
        self,
        prompt: str | list[int],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        most: int | None,
    ) -> TokenPrompt:
        if isinstance(prompt, list):
            self._check_tokens(len(truncation.cut(prompt, self._processor.max_model_len - 1)))
        parsed = self._processor.parse(prompt, add_special_tokens, truncation, most)
        return TokenPrompt(parsed.token_ids, parsed.text, cache_salt)

    def read_seen(
        self,
        prompt: str | list[int],
        pictures: Mapping[str, Any],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
    ) -> TokenPrompt:
        """A text or token ids with `pictures`, keys of a prompt dict. This waits until they are processed."""
        check_salt(cache_salt)
        given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **pictures}
        if cache_salt is not None:
            given["cache_salt"] = cache_salt
        parsed = self._processor.parse(given, add_special_tokens, truncation)
        return TokenPrompt(parsed.token_ids, parsed.text, cache_salt, mm_features=parsed.mm_features)

    def read_chat(
        self,
        messages: list[dict[str, Any]],
        truncation: Truncation,
        add_special_tokens: bool,
        cache_salt: str | None,
        *,
        most: int | None = None,
        template_variables: Mapping[str, Any] = NOTHING,
        **template: Any,
    ) -> TokenPrompt:
        """A conversation; `template` are further arguments of `InputProcessor.chat_prompt`. With pictures this waits
        until they are processed.

        Templates write special tokens themselves; `add_special_tokens` adds the tokenizer's own to them.
        """
        check_salt(cache_salt)
        if cache_salt is not None and has_pictures(messages):
            template["cache_salt"] = cache_salt  # names of pictures belong to it
        prompt = self._processor.chat_prompt(
            messages,
            add_special_tokens=add_special_tokens,
            truncation=truncation,
            most=most,
            template_variables={**self._template_variables, **template_variables},
            **template,
        )
        features = prompt.get("mm_features", ())
        return TokenPrompt(prompt["prompt_token_ids"], prompt["prompt"], cache_salt, prompt.get("ending"), features)

    def _check_tokens(self, count: int) -> None:
        """Raise ServingError when so many ids can never fit, before each of them is looked at."""
        if count >= self._processor.max_model_len:
            raise ServingError(
                f"the prompt has {count} tokens, but prompt and output together may have at most max_model_len = "
                f"{self._processor.max_model_len}. Shorten it.",
                "prompt",
            )


def check_salt(salt: str | None) -> None:
    if salt and any(character in SALT_FORBIDDEN for character in salt):
        raise ServingError(f"cache_salt is {salt!r}; it must not contain @, / or \\. Change it.", "cache_salt")


@dataclass(frozen=True)
class OutputFormats:
    """How the model writes calls and thinking; None: not known, or not to be looked for."""

    tool_parser: str | None = None
    reasoning_parser: str | None = None
    known: Formats = BUILT_IN


def output_formats(options: ServerOptions, templates: ChatTemplates, known: Formats = BUILT_IN) -> OutputFormats:
    """What the options say, of the formats that are `known`. Raises ConfigError when calls are to be found but no
    format is known, and for a name that is not."""
    tool_parser = options.tool_call_parser
    if options.enable_auto_tool_choice and tool_parser is None:
        template = templates.sources.get("tool_use", templates.sources.get("default", ""))
        tool_parser = tool_parser_of(template)
        if tool_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice is given, but the model's chat template does not show how it writes calls. "
                f"Add --tool-call-parser with one of {', '.join(sorted(known.tools))}."
            )
    check_formats(options, known)
    return OutputFormats(tool_parser, options.reasoning_parser, known)


@dataclass(frozen=True)
class Conversation:
    """A request of any API. `template` are further arguments of `InputProcessor.chat_prompt`, the tools among them.

    `shape` is what the output must look like, where the client says so.
    """

    messages: list[dict[str, Any]]
    template: Mapping[str, Any] = MappingProxyType({})
    tool_use: ToolUse | None = None
    shape: StructuredOutputsParams | None = None
    include_reasoning: bool = True
    truncation: Truncation = field(default_factory=Truncation)
    add_special_tokens: bool = False
    cache_salt: str | None = None


def read_conversation(
    conversation: Conversation, params: SamplingParams, formats: OutputFormats, prompts: PromptReader
) -> tuple[TokenPrompt, SamplingParams, Reading]:
    """The prompt, the parameters, and how the output is read. Takes long for long conversations.

    `params` are those of the client, to which shape and special tokens are added.

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
        thinking_markers=thinking_markers(reading),
        **conversation.template,
    )
    params = params.clone()
    if reading.finds_markers:
        params.skip_special_tokens = False
    if shape is not None:
        params.structured_outputs = after_thinking(shape, reading, prompt.ending or "")
    return prompt, params, reading


def reading_of(conversation: Conversation, formats: OutputFormats) -> Reading:
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
        formats=formats.known,
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


def after_thinking(shape: StructuredOutputsParams, reading: Reading, ending: str) -> StructuredOutputsParams:
    """The shape of an output before which the model may think freely. `ending` is that of its prompt.

    Raises RequestError where that cannot be.
    """
    if reading.reasoning_parser is None:
        return shape
    thinking = reasoning_format_named(reading.reasoning_parser, reading.formats)
    if not isinstance(thinking, ReasoningFormat):
        raise RequestError(
            f"structured_outputs cannot be used: thinking in the format {reading.reasoning_parser!r}, which this "
            "server looks for, has no one end after which an answer could begin. Leave it out.",
            "structured_outputs",
        )
    marks = Thinking(thinking.start, thinking.end, thinking.is_open_after(ending))
    return msgspec.structs.replace(shape, thinking=marks)


def thinking_markers(reading: Reading) -> tuple[str, ...]:
    """The texts between which the model thinks, as far as a prompt may hold them."""
    name = reading.reasoning_parser
    found = None if name is None else reasoning_format_named(name, reading.formats)
    return (found.start, found.end) if isinstance(found, ReasoningFormat) else ()


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a part of a message -> its key that holds a text."""
PICTURE_PARTS = {**KEYS, **VIDEO_KEYS, "image_embeds": "image_embeds"}
"""Type of a part of a message -> its key that holds a picture or a video, or where one is."""


def has_pictures(messages: Sequence[Any]) -> bool:
    """Whether a part of a message is a picture, or names one. Messages need not have been checked."""
    return any(
        isinstance(part, dict) and text_key(part) is None
        for message in messages
        if isinstance(message, dict) and isinstance(content := message.get("content"), list)
        for part in content
    )


def template_messages(messages: list[dict[str, Any]], takes_pictures: bool) -> list[dict[str, Any]]:
    """Messages as templates read them: roles checked, parts of text and of pictures only, aliases of old clients
    renamed.

    Raises ServingError naming the message at fault.
    """
    if not messages:
        raise ServingError("messages is an empty list. Give at least one message.", "messages")
    check_depth("messages", messages)
    return [template_message(message, f"messages[{i}]", takes_pictures) for i, message in enumerate(messages)]


def template_message(message: dict[str, Any], path: str, takes_pictures: bool) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ServingError(f"{path}.role is {role!r}; it must be a text such as 'user'.", f"{path}.role")
    prepared = dict(message)
    if "reasoning_content" in prepared:
        prepared.setdefault("reasoning", prepared.pop("reasoning_content"))
    content = message.get("content")
    if isinstance(content, list):
        prepared["content"] = [
            template_part(part, f"{path}.content[{i}]", takes_pictures) for i, part in enumerate(content)
        ]
    elif content is None and role == "assistant":
        prepared["content"] = ""  # an output that was nothing but tool calls; templates add texts to it
    elif not isinstance(content, str):
        raise ServingError(f"{path}.content must be a text or a list of parts. Correct it.", f"{path}.content")
    return prepared


def text_key(part: dict[str, Any]) -> str | None:
    """The key under which a part has its text; None for a part of another kind, or of none."""
    kind = part.get("type")
    return TEXT_PARTS.get(kind) if isinstance(kind, str) else None


def template_part(part: Any, path: str, takes_pictures: bool) -> dict[str, Any]:
    """A part as a text, or as a picture that knows what clients call it. Raises ServingError for other media."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    key = None if kind is None else text_key(part)
    if key is None:
        if takes_pictures and isinstance(kind, str) and kind in PICTURE_PARTS:
            return picture_part(part, path)
        what, types = ("text and pictures", "'text' and 'image_url'") if takes_pictures else ("text", "'text'")
        raise ServingError(
            f"{path}.type is {kind!r}, but the model takes {what} only. Use parts of type {types}.", f"{path}.type"
        )
    if not isinstance(part.get(key), str):
        raise ServingError(f"{path}.{key} must be a text. Correct it.", f"{path}.{key}")
    return {"type": "text", "text": part[key]}


def picture_part(part: dict[str, Any], path: str) -> dict[str, Any]:
    """The part as `InputProcessor.chat_prompt` reads it; `field` is what errors call it."""
    key = PICTURE_PARTS[part["type"]]
    is_object = key in ("image_url", "video_url") and isinstance(part.get(key), dict)
    return {**part, "field": f"{path}.{key}.url" if is_object else f"{path}.{key}"}


def message_text(message: dict[str, Any]) -> str:
    """The text of a prepared message."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as chat templates read them. Raises ServingError for other kinds, and for names that come twice."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        function = tool["function"]
        if tool["type"] != "function":
            path = f"tools[{index}].type"
            raise ServingError(f"{path} is {tool['type']!r}; only 'function' is served.", path)
        check_depth(f"tools[{index}].function.parameters", function.get("parameters"))
        if function["name"] in names:
            path = f"tools[{index}].function.name"
            raise ServingError(f"{path} is {function['name']!r}, as that of another tool. Rename one.", path)
        names.add(function["name"])
    return tools


def tool_use(
    choice: str | None, named: str | None, tools: list[dict[str, Any]] | None, parallel: bool
) -> ToolUse | None:
    """The tools and whether to call them; None without tools. `named`: the function that must be called.

    Raises ServingError for a choice that cannot be.
    """
    if not tools:
        if named is None and (choice in (None, "none") or (choice == "auto" and tools is not None)):
            return None
        raise ServingError("tool_choice is given without tools. Give tools, or leave it out.", "tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    if named is not None:
        if named not in names:
            raise ServingError(
                f"tool_choice names the function {named!r}, but tools has {', '.join(names)}.", "tool_choice"
            )
        return ToolUse(tools, "named", named, parallel)
    if choice not in (None, "auto", "none", "required"):
        raise ServingError(
            f"tool_choice is {choice!r}; it must be 'none', 'auto', 'required', or name a function.", "tool_choice"
        )
    return ToolUse(tools, choice or "auto", parallel=parallel)


def template_variables(
    given: Mapping[str, Any] | None, documents: Any = None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """What chat templates read besides messages and tools. Raises ServingError."""
    variables = dict(given or {})
    check_depth("chat_template_kwargs", variables)
    check_depth("documents", documents)
    if documents is not None:
        variables["documents"] = documents
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
    return variables


def token_strs(processor: InputProcessor, token_ids: Sequence[int]) -> list[str]:
    """The tokens as the vocabulary has them."""
    backend = processor.tokenizer.backend
    return [backend.id_to_token(each) or "" for each in token_ids]


def text_of_tokens(processor: InputProcessor, token_ids: Sequence[int]) -> str:
    """The text of token ids, special tokens included. Raises ServingError for one that the vocabulary does not have."""
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < processor.vocab_size:
            raise ServingError(
                f"tokens[{place}] is {token_id}; ids are from 0 to {processor.vocab_size - 1}.", "tokens"
            )
    return processor.tokenizer.decode(token_ids, False)
