"""Writes the text of a grammar for llguidance from the structured outputs of a request, and checks its limits.

llguidance is imported where it is used: only requests with structured outputs need it. This module compiles nothing.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from jaxpaged.core.grammar.closed_schema import closable
from jaxpaged.core.grammar.one_of import settle
from jaxpaged.core.grammar.plain_schema import make_plain
from jaxpaged.core.grammar.tags import TagGrammar
from jaxpaged.core.grammar.thinking import after_thinking
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structural_tags import read_structural_tag
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

WHITESPACE = r"([ \t]{1,2}|\r?\n[ \t]{0,40})"
"""White space between the parts of JSON unless the request says otherwise: a space or two, or a new line and its
indentation. Without a bound, a model that is made to write JSON can write spaces for ever."""

MOST_ERROR_TEXT = 400
MOST_LEXER_STATES = 50_000
"""1 to 2 kB each, in every matcher."""


def grammar_text(params: StructuredOutputsParams, added_tokens: Mapping[str, int] = MappingProxyType({})) -> str:
    """The grammar of an answer, and of the thinking before it. `added_tokens` are those outside the vocabulary's model,
    by text: a model writes a marker that is one of them with that token.

    Raises RequestError when it cannot be written as a grammar, or when llguidance is not installed.
    """
    answer = answer_grammar(params, added_tokens)
    return answer if params.thinking is None else after_thinking(answer, params.thinking, added_tokens)


def answer_grammar(params: StructuredOutputsParams, added_tokens: Mapping[str, int]) -> str:
    llguidance = import_llguidance()
    kind = params.kind
    try:
        match kind:
            case "structural_tag":
                tag = read_structural_tag(as_object(getattr(params, kind)))
                return TagGrammar(partial(grammar_of, params), added_tokens).write(tag)
            case "json_object":
                return grammar_of(params, "json", {"type": "object", "additionalProperties": True})
            case "choice":
                return llguidance.grammar_from("choice", json.dumps(params.choice))
            case _:
                return grammar_of(params, kind, getattr(params, kind))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs cannot be used: {error}.", "structured_outputs") from error


def grammar_of(params: StructuredOutputsParams, kind: str, value: Any) -> str:
    """The grammar of a schema, a regular expression or a grammar, with what `params` says of JSON."""
    llguidance = import_llguidance()
    if kind != "json":
        return llguidance.grammar_from(kind, value)
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    schema = json.dumps(schema_of(params, value))
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)


def as_object(value: str | dict[str, Any]) -> dict[str, Any]:
    """A JSON object that may be given as its text; a copy."""
    return json.loads(value if isinstance(value, str) else json.dumps(value))


def schema_of(params: StructuredOutputsParams, value: str | dict[str, Any]) -> dict[str, Any]:
    schema = as_object(value)
    # What a schema says to the compiler itself is not for requests to set.
    schema.pop("x-guidance", None)
    parts = closable(schema, unnamed=params.disable_additional_properties)
    closed = settle(schema, {id(part) for part in parts})
    for part in parts:
        if id(part) in closed:
            part["additionalProperties"] = False
    make_plain(schema)
    return schema


def error_of(matcher: Any) -> str | None:
    """What is wrong with a matcher of llguidance, on one line; None: nothing."""
    if not matcher.is_error():
        return None
    words = matcher.get_error().replace("<non-verbose/>", "").split()
    if words and words[0].startswith("NoExtension"):
        return "no text fits the grammar."
    return in_our_words(" ".join(words))[:MOST_ERROR_TEXT] or "the grammar cannot be followed."


def limits() -> Any:
    """What one grammar may cost: what is beyond fails the one request that asked for it."""
    return import_llguidance().LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)


def import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(
            "structured_outputs need the package llguidance, which is missing. Install it: pip install llguidance",
            "structured_outputs",
        ) from error
    return llguidance


INSTEAD = {
    "not": "Say what is allowed instead, with enum, type or anyOf.",
    "uniqueItems": "Leave it out, and look for items that come twice in the answer; what was written is not compared.",
    "contains": "Say what each item is, with prefixItems and items.",
    "minContains": "Say what each item is, with prefixItems and items.",
    "maxContains": "Say what each item is, with prefixItems and items.",
    "if": "Write each case as an alternative of anyOf.",
    "then": "Write each case as an alternative of anyOf.",
    "else": "Write each case as an alternative of anyOf.",
    "propertyNames": "Name the properties, or use patternProperties, and set additionalProperties to false.",
    "unevaluatedProperties": "Put all properties into one schema, and set its additionalProperties to false.",
    "unevaluatedItems": "Put all items into one schema, and set its items to false.",
    "$dynamicRef": "Use $ref.",
    "$recursiveRef": "Use $ref.",
}
"""Keyword -> what does its work in a schema that a grammar can follow."""
ONE_OF = (
    "it has a oneOf of which two alternatives may fit the same answer. Use anyOf, or make them exclude each other: a "
    "property that each requires, with another const in each"
)
COUNTS = (
    "it has minProperties or maxProperties beside properties that may be left out. Leave them out, or make all of the "
    "properties required"
)
NO_TEXT = "no text fits all that it asks for: {}. Loosen it"


def in_our_words(problem: str) -> str:
    """A problem with a schema as a client hears it; one that has no words here as it is."""
    if unknown := re.search(r"Unimplemented keys: (\[.*?\])", problem):
        return unknown_keywords(json.loads(unknown[1]))
    if "coerce_one_of" in problem:
        return ONE_OF
    if "min/maxProperties only supported" in problem:
        return COUNTS
    if "regex for integer range" in problem or "regex for float range" in problem:
        return "it has a minimum or a maximum that is too large to be followed. Leave it out, or take one below 2^63"
    if alike := re.search(r"patternProperty regexes (.*) and (.*) are not disjoint", problem):
        return f"the names that two of its patternProperties fit may be the same: {alike[1]} and {alike[2]}. Narrow one"
    if unsatisfiable := re.search(r"Unsatisfiable schema: (.*)", problem):
        reason = unsatisfiable[1]
        if reason.startswith("Regex is empty"):
            reason = "pattern, format and lengths of a string contradict each other"
        return NO_TEXT.format(reason)
    return problem


def unknown_keywords(keywords: list[str]) -> str:
    advice = dict.fromkeys(INSTEAD.get(keyword, "Leave it out.") for keyword in keywords)
    return f"{' and '.join(keywords)} cannot be followed here. {' '.join(advice)}".rstrip(".")
