"""Objects have the properties that their schema names: never one more, and never one that another part forbids."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from jaxpaged.core.grammar.closed_schema import close_objects

A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}


def closed(schema, **options):
    made = copy.deepcopy(schema)
    close_objects(made, **options)
    return made


def takes(schema, value, **options):
    return Draft202012Validator(closed(schema, **options)).is_valid(value)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (A, [{"a": 1}, {}, 3], [{"a": 1, "b": 2}, {"": 0}]),
        ({"items": A}, [[{"a": 1}]], [[{"b": 1}]]),
        ({"properties": {"a": A}}, [{"a": {"a": 1}}], [{"a": {"b": 1}}]),
        ({"patternProperties": {"^x": {}}}, [{"xy": 1}], [{"y": 1}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"c": 1}, {"a": 1, "b": 1}]),
        ({"$ref": "#/$defs/n", "$defs": {"n": A}, "description": "?"}, [{"a": 1}], [{"b": 1}]),
        ({"allOf": [A]}, [{"a": 1}], [{"b": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": []}]}, [{"a": 1}], [{"b": 1}]),
        # Where the schema says something, that holds.
        ({**A, "additionalProperties": True}, [{"b": 1}], []),
        ({**A, "additionalProperties": {"type": "integer"}}, [{"b": 1}], [{"b": "x"}]),
        # What several schemas describe together stays open, rather than to forbid what one of them asks for.
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], []),
        ({**A, "$ref": "#/$defs/n", "$defs": {"n": B}}, [{"a": 1, "b": 1}], []),
        ({**A, "anyOf": [{**B, "required": ["b"]}, {"required": ["a"]}]}, [{"a": 1, "b": 1}], []),
        (
            {"allOf": [{"anyOf": [A, {"$ref": "#/$defs/n"}]}, {"properties": {"c": {}}}], "$defs": {"n": B}},
            [{"b": 1, "c": 1}],
            [],
        ),
        # So does what is asked for more than it names, whoever asks.
        ({**A, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"items": {**A, "required": ["b"]}, "minItems": 1}, [[{"b": 2}]], [[{}], []]),
        ({"properties": {"x": {**A, "required": ["b"]}}}, [{"x": {"b": 1}}], [{"x": {}}, {"y": 1}]),
        ({"allOf": [A, {"required": ["b"]}]}, [{"b": 1}], [{"a": 1}]),
        ({"required": ["b"], "allOf": [{"anyOf": [A, B]}]}, [{"a": 1, "b": 1}, {"b": 1}], [{"a": 1}]),
        ({"$ref": "#/$defs/n", "required": ["b"], "$defs": {"n": A}}, [{"b": 1}], [{"a": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"b": 1}], [{}]),
        ({**A, "minProperties": 2}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"allOf": [A, {"minProperties": 2}]}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"properties": {"a": False, "b": {}}, "minProperties": 2}, [{"c": 1, "b": 1}], [{"b": 1}]),
        ({**A, "const": {"a": 1, "b": 2}}, [{"a": 1, "b": 2}], [{"a": 1}]),
        ({"allOf": [A, {"enum": [{"c": 1}]}]}, [{"c": 1}], [{}]),
        ({**A, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({**A, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({**A, "dependencies": {"a": B, "b": ["c"]}}, [{"a": 1, "b": 1, "c": 1}], []),
        ({"patternProperties": {"^x": {}}, "required": ["xa"]}, [{"xa": 1}], [{}]),
        # A condition is not closed: it would be another one.
        ({"not": {**A, "required": ["a"]}}, [{"b": 1}], [{"a": 1}, {"a": 1, "b": 1}]),
        ({"contains": A, "minContains": 0, "maxContains": 0}, [[]], [[{"b": 1}]]),
        # References into lists, by anchors, with escapes, to where no keyword stands, and those that lead nowhere.
        ({"allOf": [{"$ref": "#/$defs/l/anyOf/1"}, B], "$defs": {"l": {"anyOf": [{}, A]}}}, [{"a": 1, "b": 1}], []),
        ({"allOf": [{"$ref": "#here"}, B], "$defs": {"l": {**A, "$anchor": "here"}}}, [{"a": 1, "b": 1}], []),
        ({"allOf": [{"$ref": "#/$defs/x%20~1y"}, B], "$defs": {"x /y": A}}, [{"a": 1, "b": 1}], []),
        ({"allOf": [{"$ref": "#/own/x"}, B], "own": {"x": {"$ref": "#/own/y"}, "y": A}}, [{"a": 1, "b": 1}], []),
        ({"$id": "https://x.org/s", "allOf": [{"$ref": "s#/$defs/x"}, B], "$defs": {"x": A}}, [{"a": 1, "b": 1}], []),
        # Properties may have the names of keywords, and values may look like schemas.
        ({"properties": {"properties": {"type": "string"}}}, [{"properties": "x"}], [{"additionalProperties": 1}]),
        ({"const": {"properties": {}}}, [{"properties": {}}], [{"properties": {}, "additionalProperties": False}]),
        # Objects that name nothing may hold anything.
        ({"type": "object"}, [{"x": 1}], []),
    ],
)
def test_what_is_not_named_is_refused_where_one_schema_speaks_of_an_object(schema, taken, refused):
    assert all(takes(schema, value) for value in taken)
    assert not any(takes(schema, value) for value in refused)


def test_objects_that_name_nothing_can_be_closed_too():
    assert not takes({"type": "object"}, {"x": 1}, unnamed=True)
    assert takes({"type": "object"}, {}, unnamed=True)
    for schema in ({"type": "object", "allOf": [A]}, {"allOf": [{"type": "object"}, A]}, {"type": "object", **A}):
        assert takes(schema, {"a": 1}, unnamed=True)
    assert takes({"type": "object", "required": ["a"]}, {"a": 1}, unnamed=True)
    assert not takes({"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": 1}, unnamed=True)


def test_references_in_a_ring_end():
    around = {"a": {"$ref": "#/$defs/b", **A}, "b": {"$ref": "#/$defs/a", "allOf": [B, {"$ref": "#"}]}}
    ring = {"$ref": "#/$defs/a", "properties": {"x": {}}, "$defs": around}
    assert "additionalProperties" not in json.dumps(closed(ring))


@st.composite
def described(draw, depth=3):
    """(a schema, a value with every property that it names and no other); objects may be described in parts."""
    if depth == 0 or draw(st.booleans()):
        return {"type": "integer"}, 1
    parts, value = [], {}
    for number in range(draw(st.integers(1, 3))):
        properties = {}
        for letter in draw(st.sets(st.sampled_from("xyz"), min_size=1)):
            name = f"{letter}{number}"
            properties[name], value[name] = draw(described(depth - 1))
        parts.append({"type": "object", "properties": properties, "required": list(properties)})
    form = draw(st.sampled_from(["allOf", "beside", "nested", "demanding"]))
    if form == "demanding":  # all that is required is said where nothing is named, and not all of it is named
        names = [name for part in parts for name in part.pop("required")]
        parts[-1]["properties"].popitem()
        return {"required": names, "allOf": parts}, value
    if form == "allOf":
        return {"allOf": parts}, value
    whole = {"allOf": parts[1:]} if form == "beside" else {"allOf": [{"allOf": parts[1:]}]}
    return ({**parts[0], **whole} if parts[1:] else parts[0]), value


@given(described())
def test_no_value_with_named_properties_only_becomes_wrong(pair):
    schema, value = pair
    assert Draft202012Validator(schema).is_valid(value)
    assert takes(schema, value)
