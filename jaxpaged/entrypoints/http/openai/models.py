"""`GET /v1/models` and `/v1/models/{id}`: which names the server knows: the model's own, and those of adapters."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response
from jaxpaged.serving.adapters import ServedAdapter
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
    """One name that can be asked. `root` is the first name of the model, or of an adapter where it was loaded from, and
    `parent` the model that an adapter adapts."""

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
        """All names of the model, and of the adapters that are loaded."""
        adapters = self._service.adapters or ()
        cards = [*map(self._card, self._service.model.names), *map(self._adapter_card, adapters)]
        return json_response(ModelList(cards))

    async def retrieve(self, request: Request) -> Response:
        """One name of the model, or of an adapter that is loaded."""
        name = request.path_params["id"]
        adapter = None if self._service.adapters is None else self._service.adapters.get(name)
        card = self._card(self._service.check_model(name)) if adapter is None else self._adapter_card(adapter)
        return json_response(card)

    def _card(self, name: str) -> ModelCard:
        model = self._service.model
        return card(name, model.created, model.names[0], None, model.max_model_len)

    def _adapter_card(self, adapter: ServedAdapter) -> ModelCard:
        info, model = adapter.info, self._service.model
        parent = adapter.base_model_name or model.names[0]
        return card(info.lora_name, adapter.created, info.lora_path, parent, model.max_model_len)


def card(name: str, created: int, root: str, parent: str | None, max_model_len: int) -> ModelCard:
    permission = ModelPermission(id=f"modelperm-{name}", created=created)
    return ModelCard(
        id=name, created=created, root=root, parent=parent, max_model_len=max_model_len, permission=[permission]
    )
