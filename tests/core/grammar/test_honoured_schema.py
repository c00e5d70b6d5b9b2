"""What a schema says holds for the answer, or it is refused in words that say what to do. jsonschema is the judge."""

import copy
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxpaged.core.grammar.plain_schema import FORMATS
from jaxpaged.core.grammar.probe import problem_with
from jaxpaged.core.grammar.text import grammar_text, limits
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")
BYTES = llguidance.LLTokenizer("byte")

OBJECT = {"type": "object"}
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["lives"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "lives": {"type": "integer"}}, "required": ["lives"]}


class Grammar:
    """The grammar of a schema, over bytes. Raises AssertionError where it is refused."""

    def __init__(self, schema):
        params = StructuredOutputsParams(json=copy.deepcopy(schema))
        problem = problem_with(params)
        assert problem is None, problem
        self._matcher = llguidance.LLMatcher(BYTES, grammar_text(params), log_level=0, limits=limits())

    def takes(self, value):
        matcher, text = self._matcher.deep_copy(), list(json.dumps(value).encode())
        return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


def problem(schema):
    return problem_with(StructuredOutputsParams(json=schema)) or ""


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        # Nested in other things, too, what is asked for can be had.
        ({"type": "array", "items": {**A, "required": ["a", "z"]}, "minItems": 1}, [[{"a": 1, "z": 2}]], [[]]),
        ({"properties": {"x": {"allOf": [A, {"required": ["z"]}]}}, "required": ["x"]}, [{"x": {"a": 1, "z": 1}}], []),
        ({"allOf": [{"$ref": "#/$defs/l/anyOf/0"}, B], "$defs": {"l": {"anyOf": [A]}}}, [{"a": 1, "b": 2}], [{"a": 1}]),
        # Formats.
        ({"type": "string", "format": "phone"}, ["x"], [1]),
        ({"properties": {"format": {"type": "string", "format": "zip"}}}, [{"format": "x"}], [{"format": 1}]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["tomorrow"]),
        # Negations.
        ({"not": {"type": "string"}}, [1, None, [], {}], ["x"]),
        ({"not": {"type": ["string", "number"]}}, [None], ["x", 1, 1.5]),
        ({"type": ["string", "integer"], "not": {"type": "integer"}}, ["x"], [1]),
        ({"not": False}, [1, "x"], []),
        ({"not": {"not": {"type": "string"}}}, ["x"], [1]),
        ({"not": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, [1], ["x", None]),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {}}}, [{"b": 1}, {}], [{"a": 1}]),
        (
            {**OBJECT, "properties": {"a": {"$ref": "#/$defs/n"}, "b": {}}, "$defs": {"n": {"not": {}}}},
            [{"b": 1}, {}],
            [{"a": 1}],
        ),
        ({"enum": ["x", "y", 1], "not": {"const": "x"}}, ["y", 1], ["x"]),
        ({"enum": [1, True], "not": {"enum": [True]}}, [1], [True]),
        ({"type": "boolean", "not": {"const": True}}, [False], [True]),
        ({"type": "string", "not": {"const": 5}}, ["x"], [5]),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}},
            [{"a": 1}, {}],
            [{"a": 1, "b": 1}],
        ),
        # One of several.
        ({"oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {}]),
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}}, [{"a": 1}], [{}]),
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog", "lives": 1}], [{"lives": 1}]),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, {}],
        ),
        ({**A, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{"a": 1, "b": 2}, {}]),
        ({**OBJECT, "properties": {"k": {}}, "oneOf": [A, B]}, [{"k": 1, "a": 1}, {"k": 1, "b": 1}], [{"k": 1}]),
        (
            {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 6}, {"type": "null"}]},
            [5, 6, None],
            ["x"],
        ),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2], [3]),
        ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]}, ["ab", "abc"], []),
        ({"oneOf": [{**A, "additionalProperties": True}, {**B, "additionalProperties": True}]}, [{"a": 1}], [{}]),
        ({"anyOf": [A, B], "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}]),
        ({"properties": {"x": {"oneOf": [{"type": "string"}, {"type": "null"}]}}}, [{"x": None}], [{"x": 1}]),
        # Items and properties.
        ({"type": "array", "uniqueItems": False}, [[1, 1]], []),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1], []], [[1, 2]]),
        ({"type": "string", "uniqueItems": True}, ["x"], []),
        ({"type": "array", "contains": {}, "items": {"type": "integer"}}, [[1]], [[], ["x"]]),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 0}, [[1], []], []),
        ({"type": "array", "minContains": 3}, [[1]], []),
        ({**OBJECT, "propertyNames": {"pattern": "^x"}}, [{"xa": 1}, {}], [{"a": 1}]),
        (
            {**OBJECT, "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": {"type": "integer"}},
            [{"x": 1}],
            [{"z": 1}, {"x": ""}],
        ),
        ({**OBJECT, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "x"}}}, [{"x": 1}], [{"z": 1}]),
        ({**OBJECT, "propertyNames": {"type": "string"}}, [{"z": 1}], []),
        (
            {**OBJECT, "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
            [{"a": 1, "b": 1}, {"b": 1}],
            [{"a": 1}],
        ),
        ({**A, "dependentRequired": {"a": ["z"]}}, [{"a": 1, "z": 1}], [{"a": 1}]),
        (
            {**OBJECT, "properties": {"a": {}}, "dependentSchemas": {"a": {"required": ["b"]}}},
            [{"a": 1, "b": 1}, {}],
            [{"a": 1}],
        ),
        ({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({**A, "unevaluatedProperties": True}, [{"a": 1, "b": 1}], []),
        ({"allOf": [A, B], "unevaluatedProperties": False}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "c": 1}]),
        ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 2]]),
        ({**OBJECT, "properties": {"a": {}, "b": {}}, "maxProperties": 2}, [{"a": 1, "b": 1}, {}], []),
        # Conditions that are none.
        ({"type": "integer", "then": {"minimum": 3}}, [1], []),
        ({"if": True, "then": {"type": "integer"}, "else": False}, [1], ["x"]),
        ({"if": False, "then": False, "else": {"type": "integer"}}, [1], ["x"]),
    ],
)
def test_what_a_schema_says_holds(schema, taken, refused):
    grammar, judge = Grammar(schema), Draft202012Validator(schema)
    assert all(map(judge.is_valid, taken)), "the case itself is wrong"
    assert all(map(grammar.takes, taken))
    assert not any(map(grammar.takes, refused))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be followed here. Leave it out, and look"),
        ({"not": {"pattern": "x"}}, "not cannot be followed here. Say what is allowed instead"),
        ({"type": "string", "not": {"const": "x"}}, "not cannot be followed here"),
        ({"type": "number", "not": {"type": "integer"}}, "not cannot be followed here"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "two alternatives may fit the same answer. Use anyOf"),
        ({"oneOf": [{"type": "string"}, {"const": "x"}]}, "two alternatives may fit"),
        ({"oneOf": [{"type": "integer"}, {"required": ["a"]}]}, "two alternatives may fit"),
        ({"oneOf": [A, A]}, "two alternatives may fit"),
        ({"type": "array", "contains": {"type": "null"}}, "contains cannot be followed here. Say what each item is"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "Write each case as an alternative of anyOf"),
        ({**OBJECT, "propertyNames": {"maxLength": 3}}, "propertyNames cannot be followed here. Name the properties"),
        ({"anyOf": [A, B], "unevaluatedProperties": False}, "unevaluatedProperties cannot be followed here. Put all"),
        ({"$dynamicRef": "#a"}, r"\$dynamicRef cannot be followed here. Use \$ref"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties or maxProperties beside properties"),
        ({"type": "integer", "minimum": 1e30}, "too large to be followed"),
        ({"type": "number", "maximum": 1e300}, "too large to be followed"),
        ({"not": {}}, "no text fits all that it asks for"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no text fits all that it asks for: minLength"),
        ({"type": "string", "pattern": "^[a-z]+$", "format": "email"}, "pattern, format and lengths of a string"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "names that two of its patternProperties fit may be the same: /"),
        ({"type": "any"}, "type is 'any'; the types of JSON are null"),
        ({"type": ["string", 5]}, "type is 5; the types of JSON"),
        ({"type": {}}, "type is {}; it must be the name of a type"),
        ({"allOf": {}}, "allOf is {}; it must be a list"),
        ({"contains": {}, "minContains": "x"}, "minContains is 'x'; it must be a number"),
        ({"properties": []}, r"properties is \[\]; it must be an object"),
    ],
)
def test_what_cannot_hold_is_refused_in_words_that_say_what_to_do(schema, words):
    found = problem(schema)
    assert re.search(words, found), found
    assert "coerce" not in found and "Unimplemented" not in found
    for nested in ({"properties": {"x": schema}}, {"allOf": [schema]}, {"$ref": "#/$defs/x", "$defs": {"x": schema}}):
        assert "coerce" not in problem(nested) and "Unimplemented" not in problem(nested)


KEYWORDS = ["not", "oneOf", "format", "uniqueItems", "contains", "if", "$ref", "propertyNames", "type"]


@pytest.mark.parametrize("name", KEYWORDS)
def test_properties_may_have_the_names_of_keywords(name):
    schema = {"type": "object", "properties": {name: {"const": {"not": {}, "oneOf": [1, 2]}}}, "required": [name]}
    assert Grammar(schema).takes({name: {"not": {}, "oneOf": [1, 2]}})


def test_the_formats_that_are_followed_are_those_that_the_library_knows():
    def is_known(name):
        text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        return "Unknown format" not in llguidance.LLMatcher(BYTES, text, log_level=0).get_error()

    others = {"idn-email", "iri", "uri-reference", "regex", "json-pointer", "int32", "password", "phone"}
    assert {name for name in FORMATS | others if is_known(name)} == FORMATS


def test_many_alternatives_with_a_tag_are_followed_and_many_that_need_comparing_are_refused_soon():
    tagged = [{**CAT, "properties": {"kind": {"const": f"k{i}"}, "lives": {"type": "integer"}}} for i in range(300)]
    grammar = Grammar({"oneOf": tagged})
    assert grammar.takes({"kind": "k299", "lives": 1}) and not grammar.takes({"kind": "k300", "lives": 1})
    wide = {"oneOf": [{"type": "array", "minItems": i, "maxItems": i} for i in range(1000)]}
    assert "too many alternatives to tell them apart. Use anyOf" in problem(wide)
    web = {"allOf": [{"allOf": [{"$ref": "#/$defs/a"}] * 90}] * 90, "$defs": {"a": {"anyOf": [A, {"$ref": "#"}]}}}
    assert problem(web)


VALUES = [
    1,
    7,
    "x",
    "long",
    None,
    True,
    [],
    [1],
    [1, 1],
    ["x"],
    {},
    {"a": 1},
    {"b": 1},
    {"a": 1, "b": 1},
    {"a": "x"},
    {"a": 1, "c": 1},
    {"k": "x"},
    {"k": "y"},
    {"k": "x", "a": 1},
    {"k": "y", "a": 1},
    {"a": {"b": 1}},
    {"a": {}},
]


def schemas():
    names = st.sets(st.sampled_from("abk"), max_size=2).map(sorted)
    leaves = st.sampled_from(
        [
            True,
            {"type": "integer"},
            {"type": "string"},
            {"type": ["string", "null"]},
            {"const": "x"},
            {"const": "y"},
            {"enum": ["x", 1]},
            {"type": "integer", "maximum": 5},
            {"type": "integer", "minimum": 6},
            {"format": "phone"},
            {"type": "string", "minLength": 3},
            {"type": "array", "maxItems": 1},
            {"not": {"type": "string"}},
            A,
            B,
            {"type": "array", "uniqueItems": True},
            {"$ref": "#/$defs/a"},
            {"$ref": "#/$defs/b"},
        ]
    )

    def more(inner):
        objects = st.builds(
            lambda props, required, extra: {"type": "object", "properties": props, "required": required, **extra},
            st.dictionaries(st.sampled_from("abk"), inner, max_size=3),
            names,
            st.sampled_from(
                [
                    {},
                    {},
                    {"additionalProperties": True},
                    {"minProperties": 1},
                    {"dependentRequired": {"a": ["b"]}},
                    {"not": {"required": ["a"]}},
                    {"unevaluatedProperties": False},
                ]
            ),
        )
        combined = st.builds(
            lambda base, keyword, parts: {**base, keyword: parts},
            st.one_of(st.just({}), objects),
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(st.one_of(inner, st.builds(lambda names: {"required": names}, names)), min_size=1, max_size=3),
        )
        return st.one_of(objects, combined, st.builds(lambda items: {"type": "array", "items": items}, inner))

    return st.recursive(leaves, more, max_leaves=6)


@settings(max_examples=150)
@given(schemas())
def test_no_answer_is_written_that_the_schema_does_not_allow(schema):
    schema = {**(schema if isinstance(schema, dict) else {}), "$defs": {"a": A, "b": CAT}}
    if problem(schema):
        return
    grammar, judge = Grammar(schema), Draft202012Validator(schema)
    assert [value for value in VALUES if grammar.takes(value) and not judge.is_valid(value)] == []


def test_every_pair_of_keywords_that_are_rewritten_goes_together():
    """Each of these is rewritten; together they still say both."""
    one = [
        {"not": {"required": ["c"]}},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False},
        {"oneOf": [{"required": ["a"]}, {"required": ["k"]}]},
        {"dependentSchemas": {"b": {"required": ["a"]}}},
    ]
    for first, second in itertools.permutations(one, 2):
        schema = {**OBJECT, "properties": {name: {} for name in "abk"}, **first, **second}
        grammar, judge = Grammar(schema), Draft202012Validator(schema)
        for names in itertools.chain.from_iterable(itertools.combinations("abk", size) for size in range(4)):
            value = dict.fromkeys(names, 1)
            assert grammar.takes(value) == judge.is_valid(value), (schema, value)
