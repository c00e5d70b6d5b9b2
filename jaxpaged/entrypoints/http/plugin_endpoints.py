"""Endpoints that plugins add to the public listener.

They are declared as ours are, so keys, errors, the access log and the OpenAPI description are the same.
"""

import dataclasses
import inspect
from collections.abc import Iterable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.entrypoints.http.endpoint import Endpoint
from jaxpaged.errors import ConfigError
from jaxpaged.plugins.loading import ending_start
from jaxpaged.serving.service import Service


def plugin_endpoints(service: Service, taken: Iterable[str]) -> list[Endpoint]:
    """Those of all plugins. Raises ConfigError for a plugin that fails, and for a path that is `taken`."""
    paths, found = set(taken), list[Endpoint]()
    for name, plugin in service.plugins.added("endpoints").items():
        with ending_start(f"the endpoint plugin {name}", "cannot be used"):
            endpoints = list(plugin(service.engine))
        for each in endpoints:
            if not isinstance(each, Endpoint) or not (each.handler.__doc__ or "").strip():
                raise ConfigError(
                    f"the endpoint plugin {name} gave {each!r}; each must be a jaxpaged.entrypoints.http.endpoint."
                    "Endpoint whose handler has a docstring, which describes it to clients."
                )
            if each.path in paths:
                raise ConfigError(f"the endpoint plugin {name} adds {each.path}, which is taken. Choose another path.")
            found.append(off_the_loop(each))
        paths.update(each.path for each in endpoints)
    return found


def off_the_loop(endpoint: Endpoint) -> Endpoint:
    """The same, with a handler that is no coroutine in a thread: it may block as long as it likes."""
    handler = endpoint.handler
    if inspect.iscoroutinefunction(handler):
        return endpoint

    async def respond(request: Request) -> Response:
        return await run_in_threadpool(handler, request)

    respond.__doc__ = handler.__doc__
    return dataclasses.replace(endpoint, handler=respond)
