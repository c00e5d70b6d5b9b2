"""The LoRA adapters that a front end has had read: which version of one a request means.

An adapter is read once, however many requests name it and however many ask at a time. The engine core decides where it
lies from then on; how a client's name becomes a folder is not known here (`serving/adapters.py`).
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from jaxpaged.engine.core_calls import AddLora, RemoveLora
from jaxpaged.errors import RequestError
from jaxpaged.messages import LoRAInfo, LoRARequest

MOST_LETTERS = 256
"""Of an adapter's name."""
LORA = "lora_request"
"""The argument that errors name."""

FolderState = tuple[tuple[str, int, int], ...]
"""Name, size and time of each file of a folder; empty where it cannot be seen from here."""


class ReadAdapter(NamedTuple):
    """For which request one was read, what reading it has told, and how its files were before."""

    request: LoRARequest
    info: LoRAInfo
    state: FolderState


class KnownAdapters:
    """The newest version of each adapter, by its number. `enabled`: whether the engine takes adapters."""

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._read: dict[int, ReadAdapter] = {}

    def known(self, given: Any) -> LoRAInfo | None:
        """What a request with this `lora_request` uses; None if that must be read first.

        With `load_inplace` an adapter is read again once its files have changed. Raises RequestError for what is no
        LoRARequest, and for a number that another adapter has.
        """
        if isinstance(given, LoRAInfo):
            return given
        request = self.checked(given)
        before = self._read.get(request.lora_int_id)
        if before is None:
            return None
        is_same = (request.lora_name, request.lora_path) == (before.request.lora_name, before.request.lora_path)
        if not (is_same or request.load_inplace):
            raise RequestError(
                f"lora_request has lora_int_id {request.lora_int_id}, but that is adapter {before.request.lora_name!r} "
                f"of {before.request.lora_path}. Give another number, or set load_inplace to replace it.",
                LORA,
            )
        if request.load_inplace and not (is_same and before.state and state_of(request.lora_path) == before.state):
            return None
        return before.info

    def checked(self, given: Any) -> LoRARequest:
        """The request. Raises RequestError unless the engine can take it."""
        if not isinstance(given, LoRARequest):
            raise RequestError(f"lora_request is {given!r}; it must be a LoRARequest.", LORA)
        if not self._enabled:
            raise RequestError(
                "lora_request is given, but the engine takes no adapters. Start it with enable_lora.", LORA
            )
        if (why := why_no_name(given.lora_name)) is not None:
            raise RequestError(f"lora_request has lora_name {given.lora_name!r:.300}; {why}.", LORA)
        if type(given.lora_int_id) is not int or not 0 < given.lora_int_id < 2**63:
            raise RequestError(
                f"lora_request has lora_int_id {given.lora_int_id!r}; it must be a whole number above 0.", LORA
            )
        if not given.lora_path:
            raise RequestError("lora_request has no lora_path. Give the folder of the adapter.", LORA)
        return given

    def put(self, request: LoRARequest, info: LoRAInfo, state: FolderState) -> None:
        """It was read. `state` is that of its folder before."""
        self._read[request.lora_int_id] = ReadAdapter(request, info, state)

    def forget(self, lora_int_id: int) -> None:
        """It is not there any more: the next request for it has it read again."""
        self._read.pop(lora_int_id, None)


class Adapters(KnownAdapters):
    """For callers that wait. `call` asks the core."""

    def __init__(self, enabled: bool, call: Callable[[Any], Any]):
        super().__init__(enabled)
        self._call = call

    def info_of(self, given: Any) -> LoRAInfo:
        """The adapter that a request names, read if need be. Raises RequestError, and what `add` does."""
        return self.known(given) or self.add(given)

    def add(self, given: Any) -> LoRAInfo:
        """Have an adapter read. Raises RequestError, and CheckpointError for files that are no adapter of the model."""
        request = self.checked(given)
        state = state_of(request.lora_path)
        info = self._call(AddLora(request))
        self.put(request, info, state)
        return info

    def remove(self, lora_int_id: int) -> bool:
        """Forget it; False where it was not there."""
        self.forget(lora_int_id)
        return self._call(RemoveLora(lora_int_id))


class AsyncAdapters(KnownAdapters):
    """For one event loop."""

    def __init__(self, enabled: bool, call: Callable[[Any], Awaitable[Any]]):
        super().__init__(enabled)
        self._call = call
        self._reading: dict[LoRARequest, asyncio.Task[LoRAInfo]] = {}

    async def info_of(self, given: Any) -> LoRAInfo:
        """The adapter that a request names. It is read if need be, once for all that ask meanwhile; who leaves stops
        nothing. Raises RequestError, and what `add` does."""
        info = self.known(given)
        if info is not None:
            return info
        reading = self._reading.get(given)
        if reading is None:
            reading = self._reading[given] = asyncio.ensure_future(self.add(given))
            reading.add_done_callback(lambda task: self._end(given, task))
        return await asyncio.shield(reading)

    async def add(self, given: Any) -> LoRAInfo:
        """Have an adapter read. Raises RequestError, and CheckpointError for files that are no adapter of the model."""
        request = self.checked(given)
        state = state_of(request.lora_path)
        info = await self._call(AddLora(request))
        self.put(request, info, state)
        return info

    async def remove(self, lora_int_id: int) -> bool:
        """Forget it; False where it was not there."""
        self.forget(lora_int_id)
        return await self._call(RemoveLora(lora_int_id))

    def _end(self, request: LoRARequest, task: asyncio.Task[LoRAInfo]) -> None:
        del self._reading[request]
        if not task.cancelled():
            task.exception()  # nobody may be left who hears of it


def why_no_name(name: Any) -> str | None:
    """What is wrong with a name for an adapter; None if nothing is."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_LETTERS:
        return f"it must be a text of 1 to {MOST_LETTERS} letters"
    return None if name.isprintable() and name == name.strip() else "it must have visible letters only"


def state_of(path: str) -> FolderState:
    """How the files of a folder are now: who writes an adapter anew changes it."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            states = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return ()
    return tuple(sorted((name, state.st_size, state.st_mtime_ns) for name, state in states))


def salt_with(lora: LoRAInfo | None, cache_salt: str | None) -> str | None:
    """What tells apart equal prompts that share no blocks since their adapters are others, for the choice of a core."""
    return cache_salt if lora is None else f"{lora.digest}/{cache_salt or ''}"
