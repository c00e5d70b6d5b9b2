"""How a front end talks to an engine core: one protocol, whether the core lives in this process or in another.

`EngineCore` itself implements it for a front end in its process, `CoreLink` for one in another process, where every
answer is awaited. This module knows neither text nor devices.
"""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.messages import EngineCoreRequest


class EngineCoreClient(Protocol):
    """What a front end may ask of an engine core."""

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests. One that can never fit is refused: by a RequestError, or by a message from far away."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests at once, and say nothing more of them; those that are unknown or ended already pass."""
        ...

    def call[R](self, call: CoreCall[R]) -> R | Awaitable[R]:
        """The core's answer. Raises what the core raises, and EngineDeadError once it has stopped."""
        ...
