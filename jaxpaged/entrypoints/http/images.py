"""`POST /v1/images/inspect`: keys and tokens of pictures, from their bytes and headers alone.

For routers, which compute block hashes to find an engine that has a prompt's beginning: nothing is decoded, fetched or
kept, and the keys are those that block hashes have.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.body import json_response, num_bytes_of, read_struct
from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.requests import off_loop
from jaxpaged.serving.service import Service

MOST_IMAGES = 1000


class InspectRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Pictures as data URLs. `mm_processor_kwargs` as in the request that will have them."""

    images: list[str]
    model: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class InspectedImage(msgspec.Struct, kw_only=True):
    """One picture. `key` is the hexadecimal name that block hashes have of it; `width` and `height` are in pixels;
    `num_tokens` tokens of a prompt stand for it: those of a `grid` of items, rows and columns."""

    index: int
    key: str
    width: int
    height: int
    num_tokens: int
    grid: tuple[int, int, int]


class InspectResponse(msgspec.Struct, kw_only=True):
    """The pictures in their order."""

    object: str = "list"
    model: str
    data: list[InspectedImage]


class Images:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def inspect(self, request: Request) -> Response:
        """Keys and token counts of pictures that are not decoded."""
        service = self._service
        body = await read_struct(request, InspectRequest, service.max_body_bytes)
        model, _ = await service.asked_model(body.model)
        found = await off_loop(num_bytes_of(request), inspected, service, body)
        return json_response(InspectResponse(model=model, data=found))


def inspected(service: Service, body: InspectRequest) -> list[InspectedImage]:
    """Takes long for large pictures. Raises ServingError and RequestError."""
    options = service.check_picture_options({"mm_processor_kwargs": body.mm_processor_kwargs})
    processor = service.engine.input_processor
    pictures = processor.pictures
    if pictures is None:
        raise ServingError(f"images is given, but {processor.why_no_pictures}. Ask another one.", "images")
    if len(body.images) > MOST_IMAGES:
        raise ServingError(f"images has {len(body.images)} pictures; {MOST_IMAGES} are taken at a time.", "images")
    from jaxpaged.multimodal.pictures import data_url_bytes  # with all that decodes

    found = []
    for index, url in enumerate(body.images):
        field = f"images[{index}]"
        data = data_url_bytes(url, field, pictures.limits)
        image = pictures.inspect(data, field, options.get("mm_processor_kwargs"))
        layout = image.layout
        found.append(
            InspectedImage(
                index=index,
                key=image.key.hex(),
                width=image.width,
                height=image.height,
                num_tokens=layout.num_tokens,
                grid=(layout.num_items, layout.rows, layout.columns),
            )
        )
    return found
