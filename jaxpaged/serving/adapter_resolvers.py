"""Who finds an adapter that nobody has loaded, by the name in a request: folders, the hub, and resolvers of others.

A resolver may raise, or never answer: only the requests that ask for the name hear of it (`serving/adapters.py`).
"""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any, Protocol

from jaxpaged.config.lora import adapter_config
from jaxpaged.messages import LoRARequest

ANY_ID = 1
"""A server numbers adapters itself."""


class LoRAResolver(Protocol):
    """vLLM's protocol."""

    def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None | Awaitable[LoRARequest | None]:
        """Where the adapter of this name lies; None: there is none here. It may be a coroutine."""
        ...


async def asked(resolver: LoRAResolver, base_model_name: str, lora_name: str) -> LoRARequest | None:
    """What a resolver finds, a coroutine or not."""
    found = resolver.resolve_lora(base_model_name, lora_name)
    return await found if inspect.isawaitable(found) else found


class FolderResolver:
    """Finds `<folder>/<name>`, if that is an adapter of this model. `base_names` are those that the model has."""

    def __init__(self, folder: str, base_names: Collection[str]):
        self._folder = Path(folder).expanduser().resolve()
        self._base_names = frozenset(base_names)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """None for a name that leads out of the folder, and for the adapter of another model."""
        return self._found(base_model_name, lora_name)

    def _found(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        path = below(self._folder / lora_name, [self._folder])
        if path is None or path == self._folder:
            return None
        base = adapter_config(path).get("base_model_name_or_path")
        if not isinstance(base, str) or base not in {base_model_name, *self._base_names}:
            return None
        return LoRARequest(lora_name, ANY_ID, str(path), base)


class HubResolver:
    """Takes a name as an id on the hub, for those that are listed. The engine downloads it."""

    def __init__(self, repos: Collection[str]):
        self._repos = frozenset(repos)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """None for a name that is not listed."""
        return LoRARequest(lora_name, ANY_ID, lora_name) if lora_name in self._repos else None


def below(path: Path, folders: Collection[Path]) -> Path | None:
    """The path without links, if it lies in one of `folders`, which have none; None if not, or if it cannot be one."""
    try:
        found = path.expanduser().resolve()
    except (OSError, ValueError, RuntimeError):
        return None
    return found if any(found.is_relative_to(folder) for folder in folders) else None


class OwnThreads:
    """Runs coroutines in event loops of their own: one that blocks its loop holds nobody up. There are `most` at a
    time, and those that never end stay among them until the process does, which waits for none."""

    def __init__(self, most: int):
        self._most = most
        self._num_alive = 0

    @property
    def is_full(self) -> bool:
        return self._num_alive >= self._most

    async def run[T](self, work: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
        """The result of a coroutine. Raises TimeoutError after `seconds`, or at once where all threads are taken, and
        what it raises."""
        if self.is_full:
            raise TimeoutError(f"{self._most} others have not ended")
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def tell(result: Any, error: Exception | None) -> None:
            self._num_alive -= 1
            if ended.done():
                return
            if error is None:
                ended.set_result(result)
            else:
                ended.set_exception(error)

        def run() -> None:
            result = error = None
            try:
                result = asyncio.run(work())
            except BaseException as raised:  # whatever it is, somebody waits for it
                error = raised if isinstance(raised, Exception) else RuntimeError(f"it raised {raised!r}")
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(tell, result, error)

        threading.Thread(target=run, name="adapter-resolver", daemon=True).start()
        self._num_alive += 1
        return await asyncio.wait_for(ended, seconds)
