"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's bodies and answers.

They are on the admin listener, and only where `allowed_lora_dirs` names folders from which adapters may be loaded.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxpaged.entrypoints.http.body import read_struct
from jaxpaged.entrypoints.http.errors import HttpError
from jaxpaged.serving.adapters import ServedAdapters
from jaxpaged.serving.errors import ErrorKind, ServingError


class LoadLoraAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter to load. `load_inplace`: it may take the name of one that is there. `is_3d_lora_weight` says nothing
    that its files do not say, and passes."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool | None = None


class UnloadLoraAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter to forget, by its name."""

    lora_name: str | None = None
    lora_int_id: int | None = None


class LoraAdapters:
    """The endpoints."""

    def __init__(self, adapters: ServedAdapters, max_body_bytes: int):
        self._adapters = adapters
        self._max_body_bytes = max_body_bytes

    async def load(self, request: Request) -> Response:
        """Load a LoRA adapter, which requests may name as their model from then on."""
        body = await read_struct(request, LoadLoraAdapterRequest, self._max_body_bytes)
        name, path = body.lora_name or "", body.lora_path or ""
        try:
            await self._adapters.load(name, path, in_place=body.load_inplace)
        except ServingError as error:
            raise as_user_input(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Forget a LoRA adapter. Requests under way finish with it."""
        body = await read_struct(request, UnloadLoraAdapterRequest, self._max_body_bytes)
        name = body.lora_name or ""
        try:
            if not name and body.lora_int_id is not None:
                raise ServingError("lora_int_id is given, but adapters are known by lora_name. Give it.", "lora_name")
            await self._adapters.unload(name)
        except ServingError as error:
            raise as_user_input(error) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def as_user_input(error: ServingError) -> ServingError:
    """It with the type that vLLM gives to what is wrong with a body."""
    if error.kind is not ErrorKind.INVALID:
        return error
    return HttpError(400, str(error), error.parameter, type="InvalidUserInput")
