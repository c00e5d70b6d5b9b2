"""What llguidance says against a JSON schema, in our words: which keyword it is, and what to write instead."""

import json
import re

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
