"""The files of the page and the guides: read once, at the start, so that no request ever names a file.

What a browser may do with them is said in headers. This module knows no engine.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".md": "text/plain; charset=utf-8",  # a browser shows it instead of saving it
}
FOLDER, GUIDE = "/page", "/guide"
"""Below them are all files but the page itself."""
ADDRESSES = {f"{FOLDER}/index.html": "/", f"{GUIDE}/README.md": f"{GUIDE}/"}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text of a model ever becomes markup
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """A file, as it is sent."""

    folder: str
    name: str
    content: bytes
    media_type: str

    @property
    def path(self) -> str:
        path = f"{self.folder}/{self.name}"
        return ADDRESSES.get(path, path)

    def route(self) -> Route:
        tag = f'"{hashlib.sha256(self.content).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": tag}

        async def answer(request: Request) -> Response:
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(self.content, headers=headers, media_type=self.media_type)

        return Route(self.path, answer, methods=["GET"])


def page_files() -> list[PageFile]:
    """All files of the page."""
    return files_of(FOLDER, resources.files(__package__) / "static")


def guide_files() -> list[PageFile]:
    """The guides that come with jaxpaged."""
    return files_of(GUIDE, resources.files("jaxpaged") / "guides")


def files_of(path: str, folder: Traversable) -> list[PageFile]:
    """The files of a folder that a browser knows, as they lie below a path."""
    return [
        PageFile(path, file.name, file.read_bytes(), MEDIA_TYPES[suffix])
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if (suffix := file.name[file.name.rfind(".") :]) in MEDIA_TYPES
    ]


def page_routes(root_path: str) -> list[Route]:
    """A route for every file. The page's links are relative, so below a `root_path` it needs the slash at the end."""

    async def with_slash(request: Request) -> Response:
        return RedirectResponse(f"{root_path}/", headers=HEADERS)

    below = [Route(root_path, with_slash, methods=["GET"])] if root_path else []
    return [*(file.route() for file in [*page_files(), *guide_files()]), *below]
