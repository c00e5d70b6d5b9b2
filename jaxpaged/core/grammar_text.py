"""From what a request asks of its answer to the text of a grammar, as llguidance takes it, and its limits.

llguidance is imported where it is used: only requests with structured outputs need it. This module compiles nothing.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxpaged.core.thinking_grammar import after_thinking
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams

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
    answer = answer_grammar(params)
    return answer if params.thinking is None else after_thinking(answer, params.thinking, added_tokens)


def answer_grammar(params: StructuredOutputsParams) -> str:
    llguidance = import_llguidance()
    try:
        match params.kind:
            case "json" | "json_object":
                options = {"whitespace_pattern": params.whitespace_pattern or WHITESPACE}
                if params.disable_any_whitespace:
                    options = {"whitespace_flexible": False}
                return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema_of(params)), overrides=options)
            case "choice":
                return llguidance.grammar_from("choice", json.dumps(params.choice))
            case kind:
                return llguidance.grammar_from(kind, getattr(params, kind))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structured_outputs cannot be used: {error}.", "structured_outputs") from error


def schema_of(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.json_object:
        return {"type": "object"}
    schema = json.loads(params.json) if isinstance(params.json, str) else json.loads(json.dumps(params.json))
    # What a schema says to the compiler itself is not for requests to set.
    schema.pop("x-guidance", None)
    if params.disable_additional_properties:
        close_objects(schema)
    return schema


def close_objects(schema: Any) -> None:
    """Objects that name their properties get no others, unless they say so."""
    pending = [schema]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            named = isinstance(item.get("properties"), dict) or item.get("type") == "object"
            if named and not {"additionalProperties", "patternProperties"} & item.keys():
                item["additionalProperties"] = False
            pending += item.values()
        elif isinstance(item, list):
            pending += item


def error_of(matcher: Any) -> str | None:
    """What is wrong with a matcher of llguidance, on one line; None: nothing."""
    if not matcher.is_error():
        return None
    words = matcher.get_error().replace("<non-verbose/>", "").split()
    if words and words[0].startswith("NoExtension"):
        return "no text fits the grammar."
    return " ".join(words)[:MOST_ERROR_TEXT] or "the grammar cannot be followed."


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
