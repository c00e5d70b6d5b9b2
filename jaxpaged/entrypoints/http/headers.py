"""Headers by which clients say something of any request: its id and its priority; and who the client is.

A bad one is refused wherever it comes. `X-Request-Id` is looked for in logs and responses. vLLM's `X-Vllm-Priority`,
which proxies send, goes before the body's priority. This module knows no endpoint.
"""

import re

import msgspec
from starlette.requests import Request

from jaxpaged.serving.errors import ServingError
from jaxpaged.serving.requests import checked_id, own_or_new

REQUEST_ID_HEADER = "X-Request-Id"
PRIORITY_HEADER = "X-Vllm-Priority"
KEY_OWNER = "jaxpaged.key_owner"
"""What a request with a good key carries in its scope: the key's digest."""
PRIORITY = re.compile(r"[-+]?[0-9]{1,19}")


def header_id(request: Request) -> str | None:
    """The id in the header, if there is one. Raises ServingError for a bad one, and for two."""
    given = request.headers.getlist(REQUEST_ID_HEADER)
    if len(given) > 1:
        raise ServingError(f"{REQUEST_ID_HEADER} is given {len(given)} times. Send one.", REQUEST_ID_HEADER)
    return checked_id(REQUEST_ID_HEADER, given[0]) if given else None


def request_id_of(request: Request, prefix: str, in_body: str | None = None) -> str:
    """`prefix` with the client's own id, from the header or the body, or with a new one. Raises ServingError."""
    in_header = header_id(request)
    own = own_or_new(in_body)
    name = request.scope["request_id"] = f"{prefix}-{in_header or own}"  # the access log reads it
    return name


def take_priority(request: Request, body: msgspec.Struct) -> None:
    """Put the header's number where the body has its own. Raises ServingError for what is none, and for two."""
    given = request.headers.getlist(PRIORITY_HEADER)
    if not given:
        return
    if len(given) > 1:
        raise ServingError(f"{PRIORITY_HEADER} is given {len(given)} times. Send one.", PRIORITY_HEADER)
    if not PRIORITY.fullmatch(given[0]):
        raise ServingError(f"{PRIORITY_HEADER} is {given[0][:40]!r}; it must be a whole number.", PRIORITY_HEADER)
    body.priority = int(given[0])


def client_of(request: Request) -> str:
    """Who asks, for shares of what is scarce: the key where keys are needed, else the address. What stands in a header
    that nobody checks would make as many clients of one as it likes."""
    owner = request.scope.get(KEY_OWNER)
    return owner or (request.client.host if request.client else "")
