"""Structural tags as grammars of llguidance: free text up to a trigger, a shape, free text again.

The text that ends free text is a lazy lexeme: it matches as soon as it is complete, in any tokens. The beginning of a
tag may also be a token of its own. This module compiles nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from jaxpaged.core.grammar.thinking import grammars_of
from jaxpaged.sampling_params import structural_tags as tags

GrammarOf = Callable[[Literal["json", "regex", "grammar"], object], str]
"""A schema, a regular expression or a grammar -> a grammar of llguidance."""


class TagGrammar:
    """Writes one grammar. `added_tokens` are those outside the vocabulary's model, by text."""

    def __init__(self, grammar_of: GrammarOf, added_tokens: Mapping[str, int]):
        self._grammar_of, self._added_tokens = grammar_of, added_tokens
        names = sorted(filter(None, added_tokens), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: list[str] = []
        self._parts: list[dict] = []

    def write(self, tag: tags.Format) -> str:
        """The grammar of a whole answer, as JSON. Raises ValueError when a part of it is no grammar."""
        start = self._rule_of(tag, ())
        lark = "\n".join([f"start: {start}", *self._rules, r"TEXT: /(.|\n)*/", ""])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._parts]})

    def _rule(self, body: str, lazy: bool = False) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _rule_of(self, tag: tags.Format, ends: Sequence[str]) -> str:
        """A rule for a format and one of the texts that may come after it; none: nothing comes."""
        if tags.is_open(tag):
            return self._rule(self._open(tag, ends))
        body = self._closed(tag)
        return self._rule(f"{body} {self._any_of(ends)}" if ends else body)

    def _open(self, tag: tags.Format, ends: Sequence[str]) -> str:
        """What goes on until an end comes."""
        match tag:
            case tags.AnyText():
                return self._text_up_to(ends)
            case tags.TriggeredTags():
                return self._triggered(tag, ends)
            case tags.Sequence(elements):
                *first, last = elements
                return " ".join([*(self._rule_of(each, ()) for each in first), self._rule_of(last, ends)])
            case tags.Or(elements):
                return " | ".join(self._rule_of(each, ends) for each in elements)
        assert isinstance(tag, tags.Tag), tag
        return f"{self._literal(tag.begin)} {self._rule_of(tag.content, ends)}"

    def _closed(self, tag: tags.Format) -> str:
        """What has an end of its own."""
        match tag:
            case tags.ConstString(value):
                return self._literal(value)
            case tags.JsonSchema(schema):
                return self._part("json", {"anyOf": [schema]} if isinstance(schema, bool) else schema)
            case tags.Regex(pattern):
                return self._part("regex", pattern)
            case tags.Grammar(grammar):
                return self._part("grammar", grammar)
            case tags.Sequence(elements):
                return " ".join(self._rule_of(each, ()) for each in elements)
            case tags.Or(elements):
                return f"({' | '.join(self._rule_of(each, ()) for each in elements)})"
            case tags.Optional(content):
                return f"{self._rule_of(content, ())}?"
            case tags.Plus(content):
                return f"{self._rule_of(content, ())}+"
            case tags.Star(content):
                return f"{self._rule_of(content, ())}*"
            case tags.Repeat():
                most = "" if tag.max < 0 else tag.max
                return f"{self._rule_of(tag.content, ())}{{{tag.min},{most}}}"
            case tags.TagsWithSeparator():
                return self._separated(tag)
            case tags.TriggeredTags():
                return self._alternatives(tag.tags)
        assert isinstance(tag, tags.Tag), tag
        return f"{self._literal(tag.begin)} {self._rule_of(tag.content, tag.ends)}"

    def _separated(self, tag: tags.TagsWithSeparator) -> str:
        one = self._rule(self._alternatives(tag.tags))
        if not tag.stop_after_first:
            separator = self._literal(tag.separator) if tag.separator else ""
            one = f"({one} ({separator} {one})*)"
        return one if tag.at_least_one else f"{one}?"

    def _alternatives(self, choices: Sequence[tags.Tag]) -> str:
        return f"({' | '.join(self._rule_of(each, ()) for each in choices)})"

    def _triggered(self, tag: tags.TriggeredTags, ends: Sequence[str]) -> str:
        """Free text with tags in it. A begin that is a token of its own triggers its tag with that token."""
        choices = []
        for trigger in tag.triggers:
            triggered = [each for each in tag.tags if each.begin.startswith(trigger)]
            if triggered:
                bodies = " | ".join(self._after(trigger, each) for each in triggered)
                choices.append(f"{self._rule(f'TEXT {json.dumps(trigger)}', lazy=True)} ({bodies})")
        for each in tag.tags:
            token, length = self._first_token(each.begin)
            if token:
                choices.append(f"TEXT {token} {self._after(each.begin[:length], each)}")
        one, text = self._rule(" | ".join(choices)), self._text_up_to(ends)
        if tag.stop_after_first:
            return f"{one} {self._any_of(ends)} | {text}" if ends else f"{one} | {text}"
        first = self._alternatives(tag.tags) if tag.at_least_one else ""
        return f"{first} {one}* {text}"

    def _after(self, begun: str, tag: tags.Tag) -> str:
        """The rest of a tag of which the beginning has been written."""
        rest = tag.begin[len(begun) :]
        return f"{self._literal(rest) if rest else ''} {self._rule_of(tag.content, tag.ends)}"

    def _text_up_to(self, ends: Sequence[str]) -> str:
        """Free text and the first of the ends that comes."""
        if not ends:
            return "TEXT"
        choices = [self._rule(f"TEXT {json.dumps(end)}", lazy=True) for end in ends]
        for end in ends:
            token, length = self._first_token(end)
            if token:
                choices.append(f"TEXT {token} {self._literal(end[length:]) if end[length:] else ''}")
        return f"({' | '.join(choices)})"

    def _any_of(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self._literal, texts))})"

    def _first_token(self, text: str) -> tuple[str, int]:
        """The added token that a text begins with, and its length; empty: none."""
        found = self._split.match(text) if self._split else None
        return (f"<[{self._added_tokens[found[0]]}]>", len(found[0])) if found else ("", 0)

    def _literal(self, text: str) -> str:
        """A text, spelled, or with the tokens that parts of it are."""
        pieces, start = [], 0
        for found in self._split.finditer(text) if self._split else ():
            pieces += [json.dumps(text[start : found.start()])] * (found.start() > start)
            pieces.append(f"<[{self._added_tokens[found[0]]}]>")
            start = found.end()
        if not pieces:
            return json.dumps(text)
        pieces += [json.dumps(text[start:])] * (start < len(text))
        return f"({json.dumps(text)} | {' '.join(pieces)})"

    def _part(self, kind: Literal["json", "regex", "grammar"], value: object) -> str:
        """A grammar of its own in this one. Raises ValueError when it is several, whose names might clash."""
        first, *others = grammars_of(self._grammar_of(kind, value))
        if others:
            raise ValueError("a grammar in a structural tag must be a single one")
        name = f"part_{len(self._parts)}"
        self._parts.append({**first, "name": name})
        return f"@{name}"
