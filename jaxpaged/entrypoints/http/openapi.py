"""`GET /openapi.json`: the OpenAPI 3.1 description of the endpoints, made from their declarations and structs."""

from collections.abc import Sequence
from types import UnionType
from typing import Any, get_args

import msgspec

from jaxpaged import __version__
from jaxpaged.entrypoints.http.endpoint import Endpoint

REF = "#/components/schemas/{name}"


def description(endpoints: Sequence[Endpoint], with_keys: bool) -> dict[str, Any]:
    """The whole document. `with_keys`: requests need an API key."""
    kinds = [kind for each in endpoints for one in (each.body, each.response, each.error) for kind in members(one)]
    ordered = sorted(set(kinds), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = operation(
            endpoint, with_keys
        )
    document = {
        "openapi": "3.1.0",
        "info": {"title": "jaxpaged", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def operation(endpoint: Endpoint, with_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": (endpoint.handler.__doc__ or "").strip().splitlines()[0],
        "operationId": f"{endpoint.method.lower()} {endpoint.path}",
        "responses": responses(endpoint, with_keys),
    }
    if endpoint.body is not None:
        described["requestBody"] = {"required": True, "content": json_content(endpoint.body)}
    if parameters := [*path_parameters(endpoint), *query_parameters(endpoint)]:
        described["parameters"] = parameters
    return described


def responses(endpoint: Endpoint, with_keys: bool) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Done"}
    if endpoint.response is not None:
        success["content"] = json_content(endpoint.response)
    if endpoint.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    codes = {
        400: endpoint.body is not None or bool(endpoint.query),
        401: with_keys,
        404: endpoint.body is not None or endpoint.not_found,
        409: endpoint.conflicts,
        413: endpoint.body is not None,
        429: endpoint.streams,
        503: endpoint.streams,
    }
    refusal = {"description": "Refused", "content": json_content(endpoint.error)}
    return {"200": success, **{str(code): refusal for code, possible in codes.items() if possible}}


def json_content(kind: type | UnionType) -> dict[str, Any]:
    schemas = [{"$ref": REF.format(name=each.__name__)} for each in members(kind)]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def members(kind: type | UnionType | None) -> tuple[type, ...]:
    """The structs that a body or a response can be."""
    if isinstance(kind, UnionType):
        return get_args(kind)
    return () if kind is None else (kind,)


def path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    names = [part.strip("{}").partition(":")[0] for part in endpoint.path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def query_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    return [{"name": each.name, "in": "query", "required": False, "schema": each.schema} for each in endpoint.query]
