"""The ids by which clients call their requests: in the header X-Request-Id of any request, or in a body.

A bad one is refused wherever it comes, since whoever sends it looks for it in logs and answers. This module knows no
endpoint.
"""

import os
import re

from starlette.requests import Request

from jaxpaged.serving.errors import ServingError

HEADER = "X-Request-Id"
REQUEST_ID = re.compile(r"[!-~]{1,128}")


def header_id(request: Request) -> str | None:
    """The id in the header, if there is one. Raises ServingError for a bad one, and for two."""
    given = request.headers.getlist(HEADER)
    if len(given) > 1:
        raise ServingError(f"{HEADER} is given {len(given)} times. Send one.", HEADER)
    return checked_id(HEADER, given[0]) if given else None


def checked_id(name: str, value: str) -> str:
    """Raises ServingError, which names the header or the field."""
    if not REQUEST_ID.fullmatch(value):
        raise ServingError(f"{name} is {value!r}; it must have 1 to 128 visible ASCII characters.", name)
    return value


def request_id_of(request: Request, prefix: str, in_body: str | None = None) -> str:
    """`prefix` with the client's own id, from the header or the body, or with a new one. Raises ServingError."""
    in_header = header_id(request)
    own = own_or_new(in_body)
    name = request.scope["request_id"] = f"{prefix}-{in_header or own}"  # the access log reads it
    return name


def own_or_new(request_id: str | None) -> str:
    """The id that a client gave in a field of its request, or a new one. Raises ServingError."""
    if request_id is not None:
        checked_id("request_id", request_id)
    return request_id or os.urandom(16).hex()
