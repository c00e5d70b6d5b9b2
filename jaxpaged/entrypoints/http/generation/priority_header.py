"""The priority that a request names in a header, as proxies do: vLLM's X-Vllm-Priority, which goes before the body's.

Whether the engine goes by priorities is checked where those of bodies are.
"""

import re

import msgspec
from starlette.requests import Request

from jaxpaged.serving.errors import ServingError

HEADER = "X-Vllm-Priority"
PRIORITY = re.compile(r"[-+]?[0-9]{1,19}")


def take_priority(request: Request, body: msgspec.Struct) -> None:
    """Put the header's number where the body has its own. Raises ServingError for what is none, and for two."""
    given = request.headers.getlist(HEADER)
    if not given:
        return
    if len(given) > 1:
        raise ServingError(f"{HEADER} is given {len(given)} times. Send one.", HEADER)
    if not PRIORITY.fullmatch(given[0]):
        raise ServingError(f"{HEADER} is {given[0][:40]!r}; it must be a whole number.", HEADER)
    body.priority = int(given[0])
