"""A line in the log for every request: who asked what, what came of it, and how long it took.

Nothing of bodies and queries gets there, and what a client made up is quoted. This module knows no endpoint.
"""

import logging
from urllib.parse import quote

from starlette.types import Scope

logger = logging.getLogger(__name__)


def log_request(scope: Scope, status: int, seconds: float, level: int = logging.INFO) -> None:
    """A request that was answered, or left, `seconds` after its headers came."""
    if not logger.isEnabledFor(level):
        return
    client = scope.get("client")
    address = client[0] if client else "-"
    method, path, request_id = quote(scope["method"]), quote(scope["path"]), scope.get("request_id")
    logger.log(
        level,
        "%s %s %d in %.3f s%s from %s",
        method,
        path,
        status,
        seconds,
        f", {request_id}," if request_id else "",
        address,
        extra={
            "method": method,
            "path": path,
            "status": status,
            "duration": round(seconds, 6),
            "client": address,
            **({"request_id": request_id} if request_id else {}),
        },
    )
