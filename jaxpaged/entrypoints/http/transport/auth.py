"""API keys: every path needs one, but for those that orchestrators probe.

Keys come as `Authorization: Bearer KEY`, or as `x-api-key: KEY`, which Anthropic's clients send. This module knows no
endpoint.
"""

from collections.abc import Iterable, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.entrypoints.http.endpoint import KEY_OWNER
from jaxpaged.entrypoints.http.errors import HttpError, error_response
from jaxpaged.serving.api_keys import KeyRing, digest


class ApiKeys:
    """Answers 401 to requests without a key from `keys`. Without keys everybody may ask."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Set[str]):
        self._app = app
        self._ring = KeyRing(keys)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in self._open_paths
        if not self._ring or not guarded:
            await self._app(scope, receive, send)
            return
        key = given_key(Headers(scope=scope))
        if self._ring.admits(key):
            await self._app({**scope, KEY_OWNER: digest(key).hex()}, receive, send)
            return
        refusal = HttpError(
            401,
            "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(refusal)(scope, receive, send)


def given_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")
