"""Which web pages may ask. A page of another site reads no response without CORS, but what it sends would still be
done: a POST without a body, such as those of the admin listener, needs nobody's leave. So it is refused here.

Browsers say which page asks (`Origin`), with every POST and across sites. Programs that are no browsers do not, and
nothing changes for them. This module knows no endpoint.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpaged.entrypoints.http.errors import error_response
from jaxpaged.serving.errors import ErrorKind, ServingError

WEB = ("http://", "https://")
"""Beginnings of the origins of pages. Others are those of extensions, which a person installed."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = "*"


class CheckOrigins:
    """Answers 403 to requests that come from a page of another site, unless it is in `allowed`.

    `local`: the server is for this machine only and asks for no key. Then a page could be of another site although it
    has the server's own host name: by letting that name, its own, lead to this machine. So the name must be one that
    nobody can do this with. `own_paths` are for the server's own pages: such names are refused there without an Origin
    too, and so is what a browser asks on behalf of another site's page.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str], local: bool, own_paths: Collection[str] = ()):
        self._app = app
        self._allowed = allowed
        self._local = local
        self._own_paths = own_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            stranger = self._stranger(Headers(scope=scope), scope["path"] in self._own_paths)
            if stranger is not None:
                await error_response(refusal(stranger))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _stranger(self, headers: Headers, is_own: bool) -> str | None:
        """The origin of the page that must not ask, if one does."""
        origin = headers.get("origin")
        if ANY in self._allowed or origin in self._allowed:
            return None
        site, host = headers.get("sec-fetch-site"), headers.get("host", "")
        if origin is None:
            if is_own and site in ("cross-site", "same-site"):
                return "another site"
            return f"http://{host}" if is_own and not self._is_trusted(host) else None
        if origin != "null" and not origin.startswith(WEB):
            return None
        names = (host.lower(), headers.get("x-forwarded-host", "").lower())
        if site != "same-origin" and (origin == "null" or urlsplit(origin).netloc.lower() not in names):
            return origin
        return None if self._is_trusted(host) else origin

    def _is_trusted(self, host: str) -> bool:
        """Whether a page that has this host name is certainly not of another site."""
        if not self._local or not host:
            return True
        allowed = {urlsplit(origin).netloc.lower() for origin in self._allowed}
        return host.lower() in allowed or is_address(host)


def is_address(host: str) -> bool:
    """Whether a Host header has an address or this machine's own name, and no name that somebody else can assign."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name in LOOPBACK_NAMES or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def refusal(origin: str) -> ServingError:
    return ServingError(
        f"Pages of {origin} may not ask this server. If they should, start it with --allowed-origins and their "
        "origin, such as https://my.site.",
        "Origin",
        kind=ErrorKind.FORBIDDEN,
    )
