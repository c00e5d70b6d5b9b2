"""Schemas are walked by where keywords stand, and mean the same where they have moved into another one."""

import pytest
from jsonschema import Draft202012Validator

from jaxpaged.sampling_params.json_schema import moved, subschemas, target

LEAF = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"default": {"$ref": "#/$defs/a"}}, "$defs": {"a": LEAF}}, {"default": 1}, {"default": "x"}),
        ({"properties": {"$ref": {"$ref": "#/$defs/a"}}, "$defs": {"a": LEAF}}, {"$ref": 1}, {"$ref": "x"}),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["b"]}, {"a": {"b": 1}, "b": 1}, {"a": {}, "b": 1}),
        ({"properties": {"a": {"$ref": "#named"}}, "$defs": {"n": {**LEAF, "$anchor": "named"}}}, {"a": 1}, {"a": ""}),
        ({"properties": {"a": {"$ref": "#/$defs/a%20b~1c"}}, "$defs": {"a b/c": LEAF}}, {"a": 1}, {"a": ""}),
        (
            {"properties": {"a": {"$ref": "#/$defs/a/anyOf/1"}}, "$defs": {"a": {"anyOf": [{}, LEAF]}}},
            {"a": 1},
            {"a": ""},
        ),
        (
            {"properties": {"a": {"$ref": "https://x.org/s#/$defs/a"}}, "$id": "https://x.org/s", "$defs": {"a": LEAF}},
            {"a": 1},
            {"a": ""},
        ),
        (
            {"properties": {"a": {"$ref": "https://x.org/s"}}, "required": ["b"], "$id": "https://x.org/s"},
            {"a": {"b": 1}, "b": 1},
            {"a": {}, "b": 1},
        ),
        # Definitions where no keyword of JSON schemas is, as OpenAPI has them.
        (
            {
                "properties": {"a": {"$ref": "#/components/schemas/a"}},
                "components": {"schemas": {"a": {"$ref": "#/components/schemas/b"}, "b": LEAF}},
            },
            {"a": 1},
            {"a": ""},
        ),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", **LEAF}, 1, ""),
        ({"const": {"$ref": "#/a", "$anchor": "b"}}, {"$ref": "#/a", "$anchor": "b"}, {"$ref": "#/$defs/t/a"}),
        ({"enum": [{"$ref": "#"}]}, {"$ref": "#"}, {}),
        ({"properties": {"a": {"default": {"$ref": "#"}, **LEAF}}}, {"a": 1}, {"a": ""}),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1, "b": 1}, {"a": 1}),
    ],
)
def test_a_schema_that_has_moved_allows_what_it_allowed(schema, good, bad):
    other = {"$defs": {"t": moved(schema, "t"), "u": moved(schema, "u")}, "prefixItems": [{"$ref": "#/$defs/t"}]}
    for whole, wrap in ((schema, lambda value: value), (other, lambda value: [value])):
        validator = Draft202012Validator(whole)
        assert validator.is_valid(wrap(good)) and not validator.is_valid(wrap(bad))


def test_references_out_of_the_document_are_left_alone():
    assert moved({"$ref": "https://x.org/a#b"}, "t") == {"$ref": "https://x.org/a#b"}


def test_data_is_no_schema_and_what_a_reference_names_is_one_once():
    data = {"const": {"type": "a"}, "enum": [{"type": "b"}], "default": {"type": "c"}, "examples": [{"type": "d"}]}
    ring = {**data, "properties": {"const": {"type": "e"}, "x": {"$ref": "#/odd/f"}}, "odd": {"f": {"$ref": "#/odd/f"}}}
    assert [part.get("type") or part.get("$ref") for part in subschemas(ring)][1:] == ["#/odd/f", "#/odd/f", "e"]


@pytest.mark.parametrize("reference", [None, 5, "", "#/no", "#/list/9", "#/list/x", "#no", "other", "#/list/0/a"])
def test_what_a_reference_does_not_find_is_none(reference):
    assert target({"list": ["text"]}, reference) is None
