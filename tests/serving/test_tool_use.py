"""The shape of forced calls, against an independent JSON schema validator's rules: references stay inside."""

import json

import pytest
from jsonschema import Draft202012Validator

from jaxpaged.core.grammar.probe import problem_with
from jaxpaged.serving.tool_use import NO_PARAMETERS, ToolUse, parameters_of


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_references_of_every_tool_lead_to_its_own_definitions():
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}}}
    one = tool("one", {**tree, "$defs": {"leaf": {"type": "string"}}})
    two = tool("two", {**tree, "$defs": {"leaf": {"type": "integer"}}})
    schema = ToolUse([one, two], "required").forced_shape().json
    for number, kind in enumerate(["string", "integer"]):
        definition = schema["$defs"][f"tool{number}"]
        assert definition["properties"]["next"]["$ref"] == f"#/$defs/tool{number}"
        path = definition["properties"]["leaf"]["$ref"]
        found = schema
        for key in path.removeprefix("#/").split("/"):
            found = found[key]
        assert found == {"type": kind}


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "$ref", "properties", "$defs", "not"])
def test_a_parameter_may_have_the_name_of_any_keyword(name):
    parameters = {"properties": {name: {"$ref": "#/$defs/leaf"}}, "required": [name], "$defs": {"leaf": {"const": 7}}}
    shape = ToolUse([tool("f", parameters)], "required").forced_shape()
    assert problem_with(shape) is None
    validator = Draft202012Validator(shape.json)
    assert validator.is_valid([{"name": "f", "parameters": {name: 7}}])
    assert not validator.is_valid([{"name": "f", "parameters": {name: 8}}])


def test_parameters_are_an_object_even_where_a_tool_does_not_say_so():
    assert parameters_of(tool("f")) == parameters_of(tool("f", {})) == NO_PARAMETERS
    assert parameters_of(tool("f", {"properties": {"a": {}}})) == {"type": "object", "properties": {"a": {}}}


def test_only_forced_calls_have_a_shape():
    assert ToolUse([tool("f")]).forced_shape() is None and ToolUse([tool("f")], "none").forced_shape() is None
    assert ToolUse([tool("f")], "named", "f").forced_shape().json == NO_PARAMETERS
    one = ToolUse([tool("f")], "required", parallel=False).forced_shape().json
    assert (one["minItems"], one["maxItems"]) == (1, 1)
    assert "maxItems" not in json.dumps(ToolUse([tool("f")], "required").forced_shape().json)
