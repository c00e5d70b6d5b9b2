"""A parameter that a model writes as text becomes what its schema allows, a string first where two things fit."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxpaged.parsing.parser import parse
from jaxpaged.parsing.typed_text import MOST_STEPS, argument_json, parameter_schema

NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFS = {
    "$defs": {
        "zip": {"type": "string"},
        "count": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "a b": {"const": 5},
        "both": {"oneOf": [{"$ref": "#/$defs/count"}, {"$ref": "#/$defs/zip"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (NULLABLE, "10115", "10115"),
        (NULLABLE, "null", None),
        (NULLABLE, "None", "None"),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, "true", "true"),
        ({"type": ["null", "string"]}, "1e3", "1e3"),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", "7"),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"$ref": "#/$defs/zip"}, "10115", "10115"),
        ({"$ref": "#/$defs/count"}, "10115", 10115),
        ({"$ref": "#/$defs/both"}, "10115", "10115"),
        ({"$ref": "#/$defs/a%20b"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/zip"}], "description": "where"}, "10115", "10115"),
        ({"allOf": [{"$ref": "#/$defs/both"}, {"type": "integer"}]}, "10115", 10115),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": [True, 2]}, "True", True),
        ({"enum": [{"a": [1]}, "x"]}, '{"a": [1.0]}', {"a": [1.0]}),
        ({"enum": ["auto"]}, "3", "3"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "3", 3),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "auto", "auto"),
        ({"type": "string", "enum": ["5", "6"]}, "5", "5"),
        ({"not": {"type": "string"}}, "5", 5),
        ({"not": {"const": "5"}}, "5", 5),
        ({"not": {"const": "6"}}, "5", "5"),
        ({"type": "number"}, "5", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "boolean"}, "False", False),
        ({"type": "array", "items": {"type": "string"}}, '["a"]', ["a"]),
        ({"items": {"type": "string"}}, '["a"]', ["a"]),
        ({"properties": {"a": {}}}, '{"a": 1}', {"a": 1}),
        ({"minimum": 3}, "5", 5),
        ({"minLength": 1}, "5", "5"),
        ({"type": "string", "pattern": "^x"}, "5", "5"),
        ({"description": "anything"}, "5", "5"),
        ({}, "5", "5"),
        (True, "5", "5"),
        (None, "5", "5"),
        ({"type": "object"}, "{oops", "{oops"),
        ({"type": "integer"}, "NaN", "NaN"),
        ({"type": "integer"}, "five", "five"),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({"type": "str"}, "5", "5"),
        ({"$ref": "#/$defs/gone"}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
    ],
)
def test_a_text_becomes_what_the_schema_allows(schema, text, value):
    made = json.loads(argument_json(text, schema, DEFS))
    assert made == value and type(made) is type(value)


@pytest.mark.parametrize(
    "root",
    [
        {"properties": {"p": {"type": "integer"}}},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"p": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"q": {}}}, {"properties": {"p": {"type": "integer"}}}]},
        {"properties": {"p": {}}, "allOf": [{"properties": {"p": {"type": "integer"}}}]},
        {"anyOf": [{"properties": {"p": {"type": "integer"}}}, {"properties": {"p": {"type": "null"}}}]},
        {"oneOf": [{"properties": {"q": {}}}, {"properties": {"p": {"const": 3}}}]},
        {"additionalProperties": {"type": "integer"}},
        {"patternProperties": {"^p": {"type": "integer"}}, "additionalProperties": False},
        {"if": {}, "then": {"properties": {"p": {"type": "integer"}}}},
        {"properties": {"p": {"$ref": "#/properties/q"}, "q": {"type": "integer"}}},
    ],
)
def test_the_schema_of_a_parameter_is_found_wherever_it_stands(root):
    assert argument_json("3", parameter_schema(root, "p"), root) == "3"
    assert parameter_schema({"additionalProperties": False}, "p") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=zip>\n10115</parameter>\n<parameter=n>3</parameter>\n</function>"),
        (
            "glm45",
            "<tool_call>f\n<arg_key>zip</arg_key>\n<arg_value>10115</arg_value>\n<arg_key>n</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
        ),
        (
            "minimax_m2",
            '<invoke name="f"><parameter name="zip">10115</parameter><parameter name="n">3</parameter></invoke>',
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="zip">10115</｜DSML｜parameter>'
            '<｜DSML｜parameter name="n">3</｜DSML｜parameter></｜DSML｜invoke>',
        ),
    ],
)
def test_every_format_whose_values_are_texts_asks_the_schema(name, text):
    schema = {"properties": {"zip": {"$ref": "#/$defs/z"}, "n": {"enum": [3]}}, "$defs": {"z": NULLABLE}}
    [call] = parse(text, name, tools={"f": schema}).tool_calls
    assert json.loads(call.arguments) == {"zip": "10115", "n": 3}


def schemas():
    leaves = st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer"},
            {"type": "null"},
            {"type": "boolean"},
            {"type": ["string", "null"]},
            {"type": "number"},
            {"enum": ["5", None]},
            {"enum": [5, "x"]},
            {"const": "null"},
            {"const": 5},
            {"$ref": "#/$defs/zip"},
            {"$ref": "#/$defs/both"},
            {"type": "object"},
            {"type": "array"},
            {},
            {"not": {"type": "string"}},
        ]
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            lambda keyword, parts: {keyword: parts}, st.sampled_from(["anyOf", "allOf"]), st.lists(inner, min_size=1)
        ),
        max_leaves=5,
    )


@given(schemas(), st.sampled_from(["5", "null", "true", "x", "[]", "{}", "1.5"]))
def test_where_the_text_or_its_json_fits_the_schema_so_does_what_is_made_of_it(schema, text):
    validator = Draft202012Validator({**DEFS, **schema})
    values = [text] if text == "x" else [text, json.loads(text)]
    made = json.loads(argument_json(text, schema, {**DEFS, **schema}))
    assert validator.is_valid(made) or not any(map(validator.is_valid, values))
    assert made == text or not validator.is_valid(text) or text == "null"


def test_a_schema_without_end_takes_bounded_work():
    wide = {"anyOf": [{"$ref": "#"}] * 50}
    assert argument_json("5", wide, wide) == '"5"'
    deep = {"allOf": [{"allOf": [{"$ref": "#"}] * 9}] * 9}
    assert parameter_schema(deep, "p") is None and MOST_STEPS < 10_000
