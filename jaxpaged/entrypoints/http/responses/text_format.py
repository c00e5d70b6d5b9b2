"""The shape that an answer's text must have: `text.format`, or vLLM's `structured_outputs`."""

from typing import Any

from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.entrypoints.http.responses.request import ResponsesRequest
from jaxpaged.structured_outputs import StructuredOutputsParams

FORMATS = ("text", "json_object", "json_schema")


def shape_of(wanted: ResponsesRequest) -> StructuredOutputsParams | None:
    """None: free text. Raises HttpError or RequestError 400 for shapes that cannot be."""
    described = None if wanted.text is None else wanted.text.format
    shape = None if described is None else shape_of_format(described)
    if wanted.structured_outputs is None:
        return shape
    if shape is not None:
        raise HttpError(
            400, "structured_outputs and text.format both say what the answer must look like. Leave one out.",
            "structured_outputs",
        )  # fmt: skip
    return StructuredOutputsParams.from_dict(wanted.structured_outputs)


def shape_of_format(described: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = described.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind != "json_schema":
        raise HttpError(
            400, f"text.format.type is {kind!r}; it must be one of {', '.join(FORMATS)}.", "text.format.type"
        )
    if not isinstance(described.get("name"), str):
        raise HttpError(400, "text.format.name must be a text. Give the schema a name.", "text.format.name")
    if not isinstance(described.get("schema"), dict):
        raise HttpError(400, "text.format.schema must be a JSON schema, which is an object.", "text.format.schema")
    return StructuredOutputsParams(json=described["schema"])
