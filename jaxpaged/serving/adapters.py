"""The adapters that a server has, by the names that clients know: loaded at the start, by the operator, or when a
request first names one.

A name means one version of an adapter at a time. Each version has a number of its own, so requests that run finish with
the version with which they began, whatever its name means by then. This module knows no protocol.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

from jaxpaged.config.lora import ADAPTER_CONFIG
from jaxpaged.engine.adapters import why_no_name
from jaxpaged.errors import CapacityError, EngineError, JaxpagedError
from jaxpaged.messages import LoRAInfo, LoRARequest
from jaxpaged.serving.adapter_resolvers import ANY_ID, LoRAResolver, OwnThreads, asked, below
from jaxpaged.serving.errors import RETRY_SECONDS, ErrorKind, ServingError, scrubbed
from jaxpaged.serving.lora_modules import LoraModule

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 30.0
"""That each resolver has for a name."""
MOST_RESOLVING = 32
"""Names that are looked for at a time, each by one resolver after the other, and resolvers that never answered."""
MOST_REFUSED = 1024
"""Names of which it is remembered that nobody has them; the oldest go first."""
REFUSED_SECONDS = 5.0
"""Before they are looked for again."""


class AdapterEngine(Protocol):
    """What reads adapters."""

    async def add_lora(self, lora_request: LoRARequest) -> LoRAInfo:
        """Read one. Raises CheckpointError for files that are no adapter of the model, and RequestError."""
        ...

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget one; requests that run with it finish."""
        ...


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter under its name. `base_model_name` is what was said of the model that it adapts."""

    info: LoRAInfo
    base_model_name: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Refused:
    """A name that was looked for in vain: until when that holds, and what clients are told; None: nobody has it."""

    until: float
    error: ServingError | None


class ServedAdapters:
    """For one event loop. `model` is what resolvers are told; no adapter may have one of the `base_names`, by which
    clients know the model. `modules` are those of the start. `load` may load from `folders`, and what `repos` lists."""

    def __init__(
        self,
        engine: AdapterEngine,
        model: str,
        base_names: Collection[str],
        *,
        modules: Sequence[LoraModule] = (),
        resolvers: Sequence[LoRAResolver] = (),
        folders: Collection[str] = (),
        repos: Collection[str] = (),
    ):
        self._engine = engine
        self._model = model
        self._base_names = frozenset(base_names)
        self._modules = tuple(modules)
        self._resolvers = tuple(resolvers)
        self._folders = [Path(folder).expanduser().resolve() for folder in folders]
        self._repos = frozenset(repos)
        self._served: dict[str, ServedAdapter] = {}
        self._refused: OrderedDict[str, Refused] = OrderedDict()
        self._finding: dict[str, asyncio.Task[LoRAInfo | None]] = {}
        self._threads = OwnThreads(MOST_RESOLVING)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ids = itertools.count(secrets.randbits(40) << 20 | 1)  # of several front ends, no two give the same

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Those that are loaded, in the order of their loading."""
        return iter(list(self._served.values()))

    @property
    def loads_at_runtime(self) -> bool:
        """Whether the operator may load and unload while the server runs."""
        return bool(self._folders)

    def obstacle(self) -> str | None:
        """Why not all adapters of the start can be asked yet; None when they can."""
        missing = [module.name for module in self._modules if module.name in self._finding]
        return f"{len(missing)} adapters are still being loaded: {', '.join(missing[:5])}." if missing else None

    def get(self, name: str) -> ServedAdapter | None:
        """The adapter that has the name now; nothing is looked for."""
        return self._served.get(name)

    async def find(self, name: str) -> LoRAInfo | None:
        """The adapter of a request, loaded if a resolver finds it; None where nobody does.

        It is looked for once for all that ask meanwhile, and again `REFUSED_SECONDS` later at the earliest. Raises
        ServingError for one that cannot be loaded, and where too many names are looked for.
        """
        served = self._served.get(name)
        if served is not None:
            return served.info
        finding = self._finding.get(name)
        if finding is None:
            if not self._resolvers or why_no_name(name) is not None:
                return None
            refused = self._refused.get(name)
            if refused is not None and time.monotonic() < refused.until:
                if refused.error is not None:
                    raise copied(refused.error)
                return None
            if len(self._finding) >= MOST_RESOLVING or self._threads.is_full:
                raise ServingError(
                    f"The model {name!r} is not loaded, and {MOST_RESOLVING} others are looked for. Ask again later.",
                    "model",
                    kind=ErrorKind.UNAVAILABLE,
                    retry_after=RETRY_SECONDS,
                )
            finding = self._begin(name, self._resolve(name))
        try:
            return await asyncio.shield(finding)
        except ServingError as error:
            raise copied(error) from error
        except JaxpagedError as error:
            raise unloadable(name, error) from error

    async def load_at_start(self) -> None:
        """Load the adapters of the start, one after the other; requests for their names wait. Raises what reading one
        raises."""
        before: Awaitable[LoRAInfo | None] | None = None
        for module in self._modules:
            before = self._begin(module.name, self._loaded_after(before, module))
        if before is not None:
            await before

    async def _loaded_after(self, before: "Awaitable[LoRAInfo | None] | None", module: LoraModule) -> LoRAInfo | None:
        """Fails as the one before it does."""
        if before is not None:
            await before
        async with self._lock(module.name):
            served = self._served.get(module.name)  # the operator may have been quicker
            if served is None:
                request = LoRARequest(module.name, next(self._ids), module.path, module.base_model_name)
                served = await self._read(request)
            return served.info

    async def load(
        self, name: str, path: str, *, in_place: bool = False, base_model_name: str | None = None
    ) -> LoRAInfo:
        """Load an adapter from one of the folders, or an id on the hub that is listed, for requests from now on.

        `in_place`: it may have the name of one that is there, whose requests finish as they began. Raises ServingError,
        which changes nothing.
        """
        if not name or not path:
            raise ServingError("Both 'lora_name' and 'lora_path' must be provided.", kind=ErrorKind.INVALID)
        self._check_name(name)
        async with self._lock(name):
            before = self._served.get(name)
            if before is not None and not in_place:
                raise ServingError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                    "set 'load_inplace' to True.",
                    "lora_name",
                )
            request = LoRARequest(name, next(self._ids), self._allowed(path), base_model_name)
            try:
                after = await self._read(request)
            except JaxpagedError as error:
                raise unloadable(name, error) from error
            if before is not None:
                await self._engine.remove_lora(before.info.lora_int_id)
            return after.info

    async def unload(self, name: str) -> None:
        """Forget an adapter; requests that run with it finish. Raises ServingError where it is not there."""
        if not name:
            raise ServingError("'lora_name' needs to be provided to unload a LoRA adapter.")
        async with self._lock(name):
            served = self._served.pop(name, None)
            if served is None:
                raise ServingError(f"The lora adapter '{name}' cannot be found.", "lora_name", kind=ErrorKind.NOT_FOUND)
            await self._engine.remove_lora(served.info.lora_int_id)
            logger.info("adapter %r is unloaded", name)

    # ---- how they come

    def _lock(self, name: str) -> asyncio.Lock:
        """One thing at a time happens to a name."""
        return self._locks.setdefault(name, asyncio.Lock())

    def _begin(self, name: str, work: Awaitable[LoRAInfo | None]) -> "asyncio.Task[LoRAInfo | None]":
        """Who waits may leave: others may wait, too."""
        task = self._finding[name] = asyncio.ensure_future(work)

        def end(task: "asyncio.Task[LoRAInfo | None]") -> None:
            del self._finding[name]
            if not task.cancelled():
                task.exception()

        task.add_done_callback(end)
        return task

    async def _read(self, request: LoRARequest) -> ServedAdapter:
        """Raises what the engine does."""
        info = await self._engine.add_lora(request)
        served = self._served[request.lora_name] = ServedAdapter(info, request.base_model_name)
        self._refused.pop(request.lora_name, None)
        logger.info("adapter %r is loaded from %s", request.lora_name, request.lora_path)
        return served

    async def _resolve(self, name: str) -> LoRAInfo | None:
        """Ask one resolver after the other. Raises ServingError, which is remembered as an unknown name is."""
        async with self._lock(name):
            served = self._served.get(name)
            if served is not None:
                return served.info
            errors: list[ServingError] = []
            for resolver in self._resolvers:
                try:
                    found = await self._asked(resolver, name)
                    if found is not None:
                        path, base = found.lora_path, found.base_model_name
                        return (await self._read(LoRARequest(name, next(self._ids), path, base))).info
                except EngineError:
                    raise
                except JaxpagedError as error:
                    errors.append(unloadable(name, error))
                except ServingError as error:
                    errors.append(error)
            worst = errors[0] if errors else None
            self._refused[name] = Refused(time.monotonic() + REFUSED_SECONDS, worst)
            if len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)
            if worst is not None:
                raise worst
            return None

    async def _asked(self, resolver: LoRAResolver, name: str) -> LoRARequest | None:
        """Raises ServingError for a resolver that raises, that does not answer, or that answers nonsense."""
        who = type(resolver).__name__
        try:
            found = await self._threads.run(lambda: asked(resolver, self._model, name), RESOLVE_SECONDS)
        except TimeoutError:
            logger.error("%s did not find adapter %r within %g s", who, name, RESOLVE_SECONDS)
            raise unresolved(name) from None
        except Exception:
            logger.exception("%s failed when it looked for adapter %r", who, name)
            raise unresolved(name) from None
        if found is None:
            return None
        path, base = getattr(found, "lora_path", None), getattr(found, "base_model_name", None)
        if not isinstance(path, str) or not path or not isinstance(base, str | None):
            logger.error("%s answered %r when it looked for adapter %r", who, found, name)
            raise unresolved(name)
        return LoRARequest(name, ANY_ID, path, base)

    # ---- what may be loaded

    def _check_name(self, name: str) -> None:
        """Raise ServingError for a name that no adapter may have."""
        if (why := why_no_name(name)) is not None:
            raise ServingError(f"lora_name is {name[:300]!r}; {why}.", "lora_name")
        if name in self._base_names:
            raise ServingError(
                f"lora_name is {name!r}, which is the name of the model itself. Give another one.", "lora_name"
            )

    def _allowed(self, path: str) -> str:
        """The path without links. Raises ServingError for one outside of the folders."""
        if path in self._repos:
            return path
        found = below(Path(path), self._folders)
        if found is not None and not (found / ADAPTER_CONFIG).is_file():
            raise ServingError(f"No adapter found for '{path[:300]}'.", "lora_path", kind=ErrorKind.NOT_FOUND)
        if found is None:
            raise ServingError(
                f"lora_path is {path[:300]!r}, which is in none of the folders of --allowed-lora-dirs. Move the "
                "adapter there, or name the folder at the start.",
                "lora_path",
                kind=ErrorKind.FORBIDDEN,
            )
        return str(found)


def unloadable(name: str, error: JaxpagedError) -> ServingError:
    """What clients are told of an adapter that cannot be read. What has to do with the engine is raised."""
    if isinstance(error, EngineError):
        raise error
    kind = ErrorKind.UNAVAILABLE if isinstance(error, CapacityError) else ErrorKind.INVALID
    return ServingError(f"The adapter {name!r} cannot be loaded: {scrubbed(str(error))}", "model", kind=kind)


def unresolved(name: str) -> ServingError:
    return ServingError(
        f"The model {name!r} is not loaded, and a resolver failed when it looked for it. The log says more.",
        "model",
        kind=ErrorKind.UNAVAILABLE,
        retry_after=REFUSED_SECONDS,
    )


def copied(error: ServingError) -> ServingError:
    """For one of several that hear of it: each adds its own traceback."""
    return ServingError(str(error), error.parameter, kind=error.kind, retry_after=error.retry_after)
