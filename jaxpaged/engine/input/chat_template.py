"""Chat messages to prompt text: Jinja templates in a sandbox, with the conventions of Hugging Face.

Templates come from a model's folder, from the option `chat_template`, or with a request. This module knows nothing
of tokens: a template writes special tokens as text.
"""

import copy
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxpaged.engine.input.tokenizer import read_json
from jaxpaged.errors import CheckpointError, ConfigError, RequestError, check_unicode

Message = Mapping[str, Any]

CONTINUE_MARK = "<<continue the last message here>> "
"""Put behind the last message to find its end in the rendered text. Its last space shows whether spaces survive."""
END_MARK = "70190348617335902"
"""Put behind every text of the messages to find what comes after the last. No filter of a template changes digits."""
TEXT_FIELDS = ("content", "reasoning", "reasoning_content", "thinking")
"""Fields of a message that hold its words."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Those that every chat may have. Templates write others too, as if they knew what they are; these must name them."""
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
"""What `render` gives to templates itself."""
LOOPS_OVER_CONTENT = re.compile(r"in\s+\w+(\.content|\[['\"]content['\"]\])|in\s+content\b")


class ChatTemplate:
    """One compiled template. Raises RequestError when its source is not valid Jinja."""

    def __init__(self, source: str):
        self.source = source
        self.takes_parts = LOOPS_OVER_CONTENT.search(source) is not None
        try:
            self._compiled = environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template is not valid Jinja: {error}. Correct the template.", "chat_template"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. `variables` are the special tokens by name, and whatever else the template reads.

        Arguments of earlier tool calls may be JSON text, as the OpenAI API has them; templates get the values.
        Raises RequestError for messages that are none, and when the template refuses them.
        """
        check_messages(messages, add_generation_prompt, continue_final_message)
        self._check_roles(messages)
        return self._rendered(
            [self._prepared(message) for message in messages],
            continue_final_message,
            {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt},
        )

    def ending(self, messages: Sequence[Message], /, *, continue_final_message: bool = False, **variables: Any) -> str:
        """What the template itself writes behind the words of the last message, of the text that `render` gives for
        the same arguments. A message that is continued is the model's: its words are part of the ending.

        Raises what `render` does.
        """
        prepared = [self._prepared(message) for message in messages]
        for message in prepared[: len(prepared) - continue_final_message]:
            mark_texts(message)
        text = self._rendered(prepared, continue_final_message, variables)
        return text.rpartition(END_MARK)[2]

    def _rendered(
        self, messages: list[dict[str, Any]], continue_final_message: bool, variables: Mapping[str, Any]
    ) -> str:
        """The text of prepared messages."""
        if continue_final_message:
            mark_last(messages)
        try:
            text = self._compiled.render({**variables, "messages": messages})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the chat template does not accept these messages: {error}. Roles: "
                f"{', '.join(str(message['role']) for message in messages)}.",
                "messages",
            ) from error
        return cut_at_mark(text) if continue_final_message else text

    def _check_roles(self, messages: Sequence[Message]) -> None:
        for index, role in enumerate(message["role"] for message in messages):
            if role not in ROLES and not any(quoted in self.source for quoted in (f"'{role}'", f'"{role}"')):
                check_unicode("messages", role)
                path = f"messages[{index}].role"
                raise RequestError(
                    f"{path} is {role!r}, which the chat template does not know. Use system, user, assistant or tool.",
                    path,
                )

    def _prepared(self, message: Message) -> dict[str, Any]:
        """A copy, with a list of text parts joined to one text for templates that know only texts."""
        prepared = copy.deepcopy(dict(message))
        parse_tool_calls(prepared)
        content = prepared.get("content")
        if isinstance(content, list) and not self.takes_parts:
            prepared["content"] = "\n".join(part_text(part) for part in content)
        return prepared


class ChatTemplates:
    """The templates of one model by name, and those that requests brought along, compiled once each."""

    def __init__(self, sources: Mapping[str, str]):
        self.sources = dict(sources)
        self._compiled: dict[str, ChatTemplate] = {}

    def choose(self, requested: str | None = None, with_tools: bool = False) -> ChatTemplate:
        """`requested` is a template or the name of one; else "tool_use" for tools where it exists, else "default".

        Raises RequestError when the model has no template.
        """
        name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if requested is not None:
            source = self.sources.get(requested, requested)
        elif name in self.sources:
            source = self.sources[name]
        else:
            names = f" (it has those named {', '.join(self.sources)})" if self.sources else ""
            raise RequestError(
                f"the model has no default chat template{names}. Give one with chat_template, or use generate "
                "with a plain prompt.",
                "chat_template",
            )
        return self._compile(source)

    def _compile(self, source: str) -> ChatTemplate:
        if source not in self._compiled:
            if len(self._compiled) >= 64:  # templates of requests must not pile up for ever
                self._compiled.clear()
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source]


def load_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any], option: str | None = None) -> ChatTemplates:
    """Templates of a model's folder; the option, where given, replaces the default one.

    `chat_template.jinja` wins over `chat_template.json`, which wins over `tokenizer_config.json`. Raises ConfigError
    for a wrong option; a model's own template is compiled when it is first used, since many never chat.
    """
    if option is not None:
        return ChatTemplates({"default": template_option(option)})
    sources = named_templates(tokenizer_config.get("chat_template"))
    sources |= named_templates(read_json(folder / "chat_template.json").get("chat_template"))
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").exists():
        sources["default"] = file.read_text(encoding="utf-8")
    return ChatTemplates(sources)


def named_templates(value: Any) -> dict[str, str]:
    """Templates by name from JSON: one text, a list of {"name", "template"}, or nothing. Raises CheckpointError."""
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value or []}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            "chat_template in the tokenizer's JSON must be a text, or a list of objects with 'name' and 'template'; "
            f"it is a {type(value).__name__}. Correct the file, or give the option chat_template."
        ) from error


def template_option(option: str) -> str:
    """The source that the option `chat_template` means: a file's content, or the text itself. Raises ConfigError."""
    source = option
    if not any(mark in option for mark in ("{{", "{%", "\n")):
        path = Path(option).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"chat_template is {option!r}, which is neither a file nor a Jinja template. Check the path."
            )
        source = path.read_text(encoding="utf-8")
    try:
        ChatTemplate(source)
    except RequestError as error:
        raise ConfigError(f"the option chat_template does not fit: {error}") from error
    return source


# ---- Jinja ---------------------------------------------------------------------------------------


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant says, for training; here its body is just rendered."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """Templates come from downloads: they may neither change their input nor reach Python."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox


def to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False):
    """Jinja's own filter escapes for HTML, which no model has seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# ---- messages ------------------------------------------------------------------------------------


def check_messages(messages: Any, add_generation_prompt: bool, continue_final_message: bool) -> None:
    """Raise RequestError for what is not a conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages is {messages!r}; it must be a list with at least one message.", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"message {index} is {message!r}; it must be a dict with 'role' and 'content'.", "messages"
            )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true, but a text cannot start a new message "
            "and continue the last one. Switch one of them off.",
            "continue_final_message",
        )


def part_text(part: Any) -> str:
    """The text of one part of a message's content. Raises RequestError for other media."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"a message has a part of type {kind!r}; only text parts are served. Leave it out.", "messages")


def parse_tool_calls(message: dict[str, Any]) -> None:
    """Turn the arguments of tool calls from JSON text to values, in place. Raises RequestError for broken JSON."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise RequestError(
                    f"the arguments of a tool call are {function['arguments']!r}, which is not JSON: {error}. "
                    "Correct the message.",
                    "messages",
                ) from error


def mark_texts(message: dict[str, Any]) -> None:
    """Put the mark behind every text of a message, those in the arguments of its calls included, in place."""
    for name in TEXT_FIELDS:
        if isinstance(message.get(name), list):
            message[name] = [marked_part(part) for part in message[name]]
        elif name in message:
            message[name] = marked(message[name])
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            function["arguments"] = marked(function.get("arguments"))


def marked_part(part: Any) -> Any:
    """A part of a content: of an object only its `text` is marked, and its type stays what it is."""
    if isinstance(part, dict):
        return {**part, "text": marked(part["text"])} if "text" in part else part
    return marked(part)


def marked(value: Any) -> Any:
    """A value whose texts, wherever they lie in it, end with the mark."""
    if isinstance(value, str):
        return value and value + END_MARK
    if isinstance(value, list):
        return [marked(each) for each in value]
    return {marked(name): marked(each) for name, each in value.items()} if isinstance(value, dict) else value


def mark_last(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the last text of the last message. Raises RequestError when it has no text."""
    last = messages[-1]
    if isinstance(last.get("content"), str):
        last["content"] += CONTINUE_MARK
        return
    for part in reversed(last.get("content") or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += CONTINUE_MARK
            return
    raise RequestError(
        "continue_final_message is true, but the last message has no text to continue. Give it some, or switch it off.",
        "continue_final_message",
    )


def cut_at_mark(text: str) -> str:
    """The text before the mark; spaces before it go where the template trims messages."""
    end = text.rfind(CONTINUE_MARK.strip())
    if end < 0:
        raise RequestError(
            "continue_final_message is true, but the chat template leaves out the last message. Switch it off.",
            "continue_final_message",
        )
    kept = text[end:].startswith(CONTINUE_MARK)
    return text[:end] if kept else text[:end].rstrip()
