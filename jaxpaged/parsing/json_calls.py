"""Formats whose calls are JSON objects with a name and arguments: hermes, llama3_json, mistral, and their kin.

This module does not know how objects are read: see `json_text.py`.
"""

from dataclasses import dataclass

from jaxpaged.parsing.json_text import TOOL_NAME, copy_value, read_call
from jaxpaged.parsing.output import Output
from jaxpaged.parsing.source import Markers, Sink, Source, Steps

MISTRAL_TAG = "[TOOL_CALLS]"
BEFORE_ARGUMENTS = Markers("{", "[ARGS]", "[CALL_ID]", MISTRAL_TAG)


@dataclass(frozen=True)
class TaggedObjects:
    """`start{...}end`, once per call, anywhere in the text. What is no call stays content, its marker included."""

    start: str
    end: str

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        markers, called = Markers(self.start, self.end), False
        while found := (yield from source.until(markers, out.content)):
            if found == self.end:
                out.content("" if called else found)
                continue
            source.keep(found)
            yield from source.spaces()
            if (yield from read_call(source, out)):
                called = True
            else:
                out.content(source.kept())


@dataclass(frozen=True)
class TaggedList:
    """`start[{...}, {...}]end`; the end may be empty, and a lone object may stand for the list."""

    start: str
    end: str = ""

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        start = Markers(self.start)
        while found := (yield from source.until(start, out.content)):
            source.keep(found)
            yield from source.spaces()
            yield from read_list(source, out)
            if self.end:
                yield from source.skip_after_space(self.end)


def read_list(source: Source, out: Output, other: Sink | None = None) -> Steps[None]:
    """Calls in a list, while the source keeps what is read. From what is no call on, all is content, or `other`."""
    in_list = yield from source.skip("[")
    yield from source.spaces()
    while (yield from source.at("{")):
        if not (yield from read_call(source, out)):
            break
        source.keep()
        if not in_list or not (yield from source.skip_after_space(",")):
            break
        source.keep()
        yield from source.spaces()
    if in_list and (yield from source.skip_after_space("]")):
        source.keep()  # the list is whole, and its brackets are nobody's content
    (other or out.content)(source.kept())


def llama3_json(source: Source, out: Output) -> Steps[None]:
    """The whole answer is one object, or several with ";" between them; `<|python_tag|>` may come before.

    Nothing else marks a call, so an object counts only with both name and parameters, and with the name of a tool
    that the request offers, if any are known.
    """
    tag = "<|python_tag|>"
    tags = Markers(tag)
    source.keep()
    yield from source.spaces()
    yield from source.skip(tag)
    while True:
        yield from source.spaces()
        if not (yield from source.at("{")) or not (yield from read_offered(source, out)):
            break
        source.keep()
        if (yield from source.skip_after_space(";")):
            source.keep()
    out.content(source.kept())
    while found := (yield from source.until(tags, out.content)):
        source.keep(found)
        yield from source.spaces()
        if not (yield from read_offered(source, out)):
            out.content(source.kept())


def read_offered(source: Source, out: Output) -> Steps[bool]:
    def accepts(name: str) -> bool:
        return not out.tools or name in out.tools

    return (yield from read_call(source, out, needs_arguments=True, accepts=accepts))


def mistral(source: Source, out: Output) -> Steps[None]:
    """`[TOOL_CALLS]` before a list of objects, or from tokenizer v11 on before each `name[ARGS]{...}`."""
    tags = Markers(MISTRAL_TAG)
    while found := (yield from source.until(tags, out.content)):
        source.keep(found)
        yield from source.spaces()
        if (yield from source.at("[")) and not (yield from source.at(MISTRAL_TAG)):
            yield from read_list(source, out)
        else:
            yield from read_named(source, out)


def read_named(source: Source, out: Output) -> Steps[None]:
    """`name{...}`, `name[ARGS]{...}` or `name[CALL_ID]id[ARGS]{...}`, while the source keeps what is read."""
    name, found = yield from source.text_until(BEFORE_ARGUMENTS)
    call_id = ""
    if found == "[CALL_ID]":
        call_id, found = yield from source.text_until(BEFORE_ARGUMENTS)
    text, name = source.kept(), name.strip()
    if found in ("{", "[ARGS]") and TOOL_NAME.fullmatch(name):
        if found == "{":
            source.unread(found)
        yield from read_arguments(source, out, name, call_id.strip())
    elif found == MISTRAL_TAG:
        source.unread(found)
        out.content(text.removesuffix(found))
    else:
        out.content(text)


def read_arguments(source: Source, out: Output, name: str, call_id: str) -> Steps[None]:
    yield from source.spaces()
    out.begin_call(name, call_id or None)
    if (yield from copy_value(source, out.arguments)):
        out.end_call()


# ---- answers that a grammar forces to be calls


def forced_list(source: Source, out: Output) -> Steps[None]:
    """The whole answer is a list of call objects: what tool_choice "required" asks the model for. Where it is cut off
    before a call has its name and the beginning of its arguments, that call is none, and no text either."""
    source.keep()
    yield from source.spaces()
    yield from read_list(source, out, other=lambda text: None)
    yield from source.rest(lambda text: None)


@dataclass(frozen=True)
class ForcedCall:
    """The whole answer is the arguments of one tool, named by the request. One that was cut off before them, in its
    thinking, has no call."""

    name: str

    def __call__(self, source: Source, out: Output) -> Steps[None]:
        yield from source.spaces()
        if not (yield from source.peek()):
            return
        out.begin_call(self.name)
        yield from source.rest(out.arguments)
        out.end_call()
