"""`GET /v1/models` and `/v1/models/{id}`: which names the server knows."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.serving.service import Service


class ModelPermission(msgspec.Struct, kw_only=True):
    """What clients expect to find; nothing is restricted."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: Any = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One name under which the model can be asked. `root` is its first name."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jaxpaged"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct):
    """All names."""

    data: list[ModelCard]
    object: str = "list"


class Models:
    """The endpoints."""

    def __init__(self, service: Service):
        self._service = service

    async def list(self, request: Request) -> Response:
        """All names of the model."""
        return json_response(ModelList([self._card(name) for name in self._service.model.names]))

    async def retrieve(self, request: Request) -> Response:
        """One name of the model."""
        return json_response(self._card(self._service.check_model(request.path_params["id"])))

    def _card(self, name: str) -> ModelCard:
        model = self._service.model
        permission = ModelPermission(id=f"modelperm-{name}", created=model.created)
        return ModelCard(
            id=name,
            created=model.created,
            root=model.names[0],
            max_model_len=model.max_model_len,
            permission=[permission],
        )
