"""What the words of `StructuredOutputsParams` alone can show to be wrong."""

import json

import msgspec
import pytest

from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_TAG_DEPTH,
    StructuredOutputsParams,
    depth_of,
)


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}


def old_tag(**fields) -> dict:
    structure = {"begin": "<a>", "schema": {}, "end": "</a>", **fields}
    return {"type": "structural_tag", "structures": [structure], "triggers": ["<"]}


def tagged(form: dict) -> dict:
    return {"structural_tag": {"type": "structural_tag", "format": form}}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "gives nothing; give exactly one of json, regex"),
        ({"regex": "a", "choice": ["b"]}, "gives regex and choice"),
        ({"json_object": False}, "it must be true"),
        ({"json": "{"}, "is not a JSON schema"),
        ({"json": "[1]"}, "a JSON schema is a JSON object"),
        ({"json": 5}, "a JSON schema is a JSON object"),
        ({"json": {"a": {1, 2}}}, "is not a JSON schema"),
        ({"json": {"a": float("nan")}}, "is not a JSON schema"),
        ({"json": nested(MAX_DEPTH + 1)}, f"nested {MAX_DEPTH + 1} deep; at most {MAX_DEPTH}"),
        ({"json": "{" + '"a":{' * 100_000}, "structured_outputs json"),
        ({"json": {"description": "x" * MAX_BYTES}}, "bytes; at most"),
        ({"regex": ""}, "must be a text, and not empty"),
        ({"regex": 5}, "must be a text, and not empty"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"grammar": "x" * (MAX_BYTES + 1)}, "bytes; at most"),
        ({"choice": []}, "1 to 4096 are possible"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"choice": ["a"] * 5000}, "1 to 4096"),
        ({"structural_tag": "["}, "is not a structural tag"),
        ({"structural_tag": "[1]"}, "a structural tag is a JSON object"),
        ({"structural_tag": {"a": nested(MAX_TAG_DEPTH)}}, f"nested {MAX_TAG_DEPTH + 1} deep; at most {MAX_TAG_DEPTH}"),
        ({"structural_tag": {"type": "structural_tag"}}, "missing required field `format`"),
        (tagged({"type": "token", "token": "a"}), r"Invalid value 'token' - at `\$.format.type`"),
        (tagged({**TAG, "begin": ""}), r"length >= 1 - at `\$.format.begin`"),
        (tagged({**TAG, "excludes": []}), "unknown field `excludes`"),
        (tagged({"type": "triggered_tags", "triggers": ["x"], "tags": [TAG]}), "exactly one of triggers must begin"),
        (tagged({"type": "triggered_tags", "triggers": ["<", "<a"], "tags": [TAG]}), "exactly one of triggers"),
        (tagged({"type": "triggered_tags", "triggers": ["<"], "tags": [{**TAG, "end": ""}]}), "a tag that has an end"),
        (tagged({"type": "sequence", "elements": [{"type": "any_text"}, TAG]}), "any_text holds free text"),
        (tagged({"type": "star", "content": {"type": "any_text"}}), "any_text holds free text, after which"),
        (tagged({"type": "repeat", "min": 3, "max": 2, "content": TAG}), "at least min, which is 3"),
        (tagged({**TAG, "end": ["a", "a"]}), "a text comes twice"),
        (tagged({**TAG, "content": {**TAG, "end": ["a", "a"]}}), "a text comes twice"),
        ({"structural_tag": old_tag(schema="{")}, "no structural tag: Expecting property name"),
        ({"structural_tag": old_tag(schema="[1]")}, r"schema is \[1\]; a JSON schema is a JSON object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "must be true or false"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "leave one of them out"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, problem):
    with pytest.raises(RequestError, match=problem) as caught:
        StructuredOutputsParams(**fields)
    assert caught.value.parameter == "structured_outputs"


def test_a_dict_will_do_and_unknown_fields_are_refused():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")
    assert params.clone() == params and params.child(1).structured_outputs == params.structured_outputs
    with pytest.raises(RequestError, match="unknown field 'regexp'. Did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "a+"})
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="a+")


def test_parameters_survive_the_wire():
    schema = {"type": "object", "properties": {"a": {"enum": [1, None, "é"]}}}
    for value in (schema, json.dumps(schema)):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=value))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_the_largest_depth_is_allowed():
    assert depth_of(nested(MAX_DEPTH)) == MAX_DEPTH
    assert StructuredOutputsParams(json=nested(MAX_DEPTH)).kind == "json"


def test_both_forms_of_structural_tags_are_taken_as_objects_and_as_text():
    for tag in (old_tag(), tagged(TAG)["structural_tag"]):
        for value in (tag, json.dumps(tag)):
            params = StructuredOutputsParams(structural_tag=value)
            assert params.kind == "structural_tag"
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params
