"""A stranger's connector on the seam, none of whose faults reaches the engine or an answer.

A stranger derives a class from `KVConnectorBase` and defines `look_up`, `start_load_kv`, `save_kv` and `discard`, and
what else of the seam it needs. `GuardedConnector` stands between that and the engine:

* `look_up`, `save_kv` and `discard` run in threads with a time limit. A look-up is PENDING meanwhile, and what the
  connector has is remembered (`kv_store/remote_store.py`).
* A load ends in bounded time: one of which no page has come for too long is finished for the connector.
* A page is copied when it is given, and then checked against its digests, whatever the connector does to it later.
* The methods of the scheduler's side run in one thread, and the engine waits for HOOK_SECONDS at most. Those that the
  class does not define cost nothing.
* A connector that raises, hangs, or returns what it must not is left alone for a while, the log says so, and requests
  go on without it.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from jaxpaged.errors import ConfigError
from jaxpaged.kv_connector.base import KVCacheLayout, KVConnectorBase, KVLoad, KVPage, KVRequest, LookUp
from jaxpaged.kv_connector.offloading import tier_stats
from jaxpaged.kv_store.breaker import CircuitBreaker
from jaxpaged.kv_store.buffers import Buffer, joined
from jaxpaged.kv_store.page import DTYPES, PageContent, PageKey
from jaxpaged.kv_store.remote_store import CALL_SECONDS, LEAST_RATE, AsyncRemoteStore, NotKept
from jaxpaged.kv_store.threads import NoAnswerError, Threads
from jaxpaged.kv_store.tier import Lookup
from jaxpaged.kv_store.tier_events import STORAGE, TierEvent, TierEventLog

logger = logging.getLogger(__name__)

NEEDED = ("look_up", "start_load_kv", "save_kv", "discard")
"""What a stranger's class must define."""
ENGINES_OWN = ("chunk_tiers", "where", "lacks")
"""What it must not: the guard answers these."""
HOOK_SECONDS = 1.0
OPEN_SECONDS = 60.0
CLOSE_SECONDS = 10.0
WATCH_SECONDS = 0.1
"""How often loads are looked at that may have been forgotten."""


def is_connector(made: Any) -> bool:
    """Whether a class is a connector on the seam, rather than a store of pages (`kv_store/custom_store.py`)."""
    return (isinstance(made, type) and issubclass(made, KVConnectorBase)) or hasattr(made, "start_load_kv")


def check_class(name: str, made: Any) -> None:
    """Raise ConfigError for a connector's class that lacks a method, or defines one that is not its own affair."""
    missing = [each for each in NEEDED if defined(made, each) is None]
    if missing:
        raise ConfigError(
            f"the kv_connector {name!r} does not define {', '.join(missing)}. A connector derives from "
            f"jaxpaged.kv_connector.KVConnectorBase and defines {', '.join(NEEDED)}."
        )
    refused = [each for each in ENGINES_OWN if defined(made, each) is not None]
    if refused:
        raise ConfigError(
            f"the kv_connector {name!r} defines {', '.join(refused)}, which the engine does itself by what `look_up` "
            "says. Leave it out."
        )


def defined(made: Any, method: str) -> Any:
    """A class's own method, which it does not have from KVConnectorBase; None: there is none."""
    found = getattr(made, method, None)
    return None if found is getattr(KVConnectorBase, method, None) else found


def open_connector(name: str, made: Any, config: Mapping[str, Any]) -> "GuardedConnector":
    """Make a connector of a stranger's class. Raises ConfigError where that cannot be done."""
    check_class(name, made)
    try:
        return GuardedConnector(name.rpartition(":")[2], made(dict(config)))
    except ConfigError:
        raise
    except Exception as error:  # it is a stranger's code
        raise ConfigError(
            f"the kv_connector {name!r} cannot be opened with kv_connector_extra_config {dict(config)!r}: "
            f"{type(error).__name__}: {error}."
        ) from error


class GuardedConnector(KVConnectorBase):
    """`connector` is a stranger's. Pages that come from it have the source `name`."""

    def __init__(self, name: str, connector: Any):
        self.name, self._connector = name, connector
        self._open = {each for each in vars(KVConnectorBase) if defined(type(connector), each) is not None}
        self._breaker = CircuitBreaker(f"The KV connector {name}", 30.0)
        self._hooks, self._starter = Threads(1, f"kv-{name}-hook"), Threads(1, f"kv-{name}-load")
        self.pages = GuardedPages(name, connector)
        self.others_wait = bool(getattr(connector, "others_wait", False))
        self._outlives_engine = bool(getattr(connector, "outlives_engine", True))
        self._lock = threading.Lock()
        self._loads: set[GuardedLoad] = set()
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name=f"kv-{name}-watch", daemon=True).start()

    @property
    def outlives_engine(self) -> bool:
        return self._outlives_engine

    def check_joined(self) -> None:
        """Raise ConfigError for a connector that cannot be one of several."""
        if "get_num_new_matched_tokens" in self._open:
            raise ConfigError(
                f"the kv_connector {self.name!r} defines get_num_new_matched_tokens, and is one of several: pages of "
                "these are joined by what `look_up` says. Leave the method out, or the other connectors (kv_offload, "
                "kv_role, those of a MultiConnector)."
            )

    def _hook[R](self, method: str, default: R, is_right: Callable[[Any], bool], *args: Any) -> R:
        """What a method of the connector returns. `default` where it has none of its own, is left alone, fails, or
        returns what it must not."""
        if method not in self._open or not self._breaker.allows():
            return default
        try:
            result: R = self._hooks.call(HOOK_SECONDS, called, getattr(self._connector, method), *args)
            if not is_right(result):
                raise TypeError(f"{method} returned {result!r:.80}")
        except Exception as error:
            self._breaker.failed(f"{method}: {type(error).__name__}: {error}")
            return default
        finally:
            for each in args:
                if isinstance(each, RequestView):
                    each.is_over = True
        self._breaker.succeeded()
        return result

    # ---- the scheduler's side ------------------------------------------------------------------

    def on_new_request(self, request: KVRequest) -> None:
        self._hook("on_new_request", None, anything, RequestView(request))

    def expect_request(self, params: Mapping[str, Any], is_coming: bool) -> None:
        self._hook("expect_request", None, anything, dict(params), is_coming)

    def before_look_up(self, request: KVRequest, pages: Sequence[tuple[PageKey, int]]) -> None:
        self._hook("before_look_up", None, anything, RequestView(request), list(pages))

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> int | None:
        if "get_num_new_matched_tokens" not in self._open:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        is_right = lambda found: found is None or (type(found) is int and found >= 0)
        view = RequestView(request)
        return self._hook("get_num_new_matched_tokens", 0, is_right, view, num_computed_tokens)

    def look_up(self, keys: Sequence[PageKey]) -> Sequence[Lookup]:
        return self.pages.lookup(keys)

    def must_load(self, request: KVRequest) -> bool:
        return self._hook("must_load", False, lambda said: type(said) is bool, RequestView(request))

    def update_state_after_alloc(
        self, request: KVRequest, pages: Sequence[PageContent], num_external_tokens: int
    ) -> None:
        view = RequestView(request)
        self._hook("update_state_after_alloc", None, anything, view, list(pages), num_external_tokens)

    def load_finished(self, request: KVRequest) -> None:
        self._hook("load_finished", None, anything, RequestView(request))

    def build_connector_meta(self) -> bytes | None:
        """As msgpack, so that what cannot travel is found here."""
        said = self._hook("build_connector_meta", None, is_plain)
        return None if said is None else msgspec.msgpack.encode(said)

    def request_finished(self, request: KVRequest, is_computed: bool) -> dict[str, Any] | None:
        is_right = lambda said: said is None or is_params(said)
        return self._hook("request_finished", None, is_right, RequestView(request), is_computed)

    def take_params(self) -> dict[str, dict[str, Any]]:
        is_right = lambda said: isinstance(said, dict) and all(map(is_params, said.values()))
        return self._hook("take_params", {}, is_right)

    def take_events(self) -> Sequence[TierEvent]:
        if "take_events" in self._open:
            is_right = lambda said: isinstance(said, Sequence) and all(isinstance(each, TierEvent) for each in said)
            return self._hook("take_events", [], is_right)
        return self.pages.take_events()

    # ---- the worker's side ---------------------------------------------------------------------

    def register_kv_caches(self, layout: KVCacheLayout) -> None:
        """Raises ConfigError where the connector does not take it."""
        self.layout = layout
        self._page_seconds = [
            self.pages.seconds_for(math.prod(group.page_shape) * itemsize_of(group.dtype)) for group in layout.groups
        ]
        try:
            self._hooks.call(OPEN_SECONDS, called, self._connector.register_kv_caches, layout)
        except ConfigError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"the kv_connector {self.name!r} cannot serve this model's KV cache: {reason}."
            ) from error

    def start_load_kv(self, loads: Sequence[KVLoad], metadata: bytes | None) -> None:
        guarded = [GuardedLoad(load, self) for load in loads]
        if not self.pages.allows_reading():
            for load in guarded:
                load.finish()
            guarded = []
        with self._lock:
            self._loads.update(guarded)
        if guarded or metadata is not None:
            said = None if metadata is None else msgspec.msgpack.decode(metadata)
            if self._starter.submit(self._start, guarded, said).cancelled():
                for load in guarded:
                    load.finish()

    def _start(self, loads: Sequence["GuardedLoad"], metadata: Any) -> None:
        try:
            called(self._connector.start_load_kv, loads, metadata)
        except Exception as error:
            self.pages.failed_to_read(error)
            for load in loads:
                load.finish()

    def seconds_for(self, content: PageContent) -> float:
        """That a page of a load may take."""
        return self._page_seconds[content.key.group]

    def ended(self, load: "GuardedLoad") -> None:
        """A load is finished."""
        with self._lock:
            self._loads.discard(load)

    def _watch(self) -> None:
        """End loads that nobody ends: the connector hangs, or its thread has died."""
        while not self._closing.wait(WATCH_SECONDS):
            with self._lock:
                late = [load for load in self._loads if time.monotonic() > load.until]
            for load in late:
                self.pages.failed_to_read(NoAnswerError("a load was not finished in time"))
                load.finish()

    def save_kv(self, pages: Sequence[KVPage]) -> Sequence[bool]:
        return [self.pages.save(page) for page in pages]

    def discard(self, keys: Sequence[PageKey]) -> None:
        self.pages.delete(keys)

    def get_kv_connector_stats(self) -> dict[str, Any]:
        """What is counted of every tier, and numbers of the connector's own, named by it."""
        is_right = lambda said: isinstance(said, Mapping) and all(type(each) in (int, float) for each in said.values())
        own: Mapping[str, float] = self._hook("get_kv_connector_stats", {}, is_right)
        named = {re.sub(r"\W", "_", f"kv_connector_{self.name}_{key}"): value for key, value in own.items()}
        return tier_stats(self.pages.usage()) | named

    def shutdown(self) -> None:
        self._closing.set()
        try:
            self._hooks.call(CLOSE_SECONDS, called, self._connector.shutdown)
        except Exception as error:
            logger.warning(
                "the KV connector %s did not end as it should: %s: %s", self.name, type(error).__name__, error
            )
        with self._lock:
            loads = list(self._loads)
        for load in loads:
            load.finish()
        for threads in (self._hooks, self._starter):
            threads.close(0.0, cancels=True)
        self.pages.close()


class GuardedPages(AsyncRemoteStore[PageKey, Buffer]):
    """The pages that a connector has: looked up, saved and discarded in threads, with time limits."""

    failures = (Exception,)

    def __init__(self, name: str, connector: Any):
        self.name, self._connector = name, connector
        self._saving: dict[PageKey, KVPage] = {}
        self._events: TierEventLog | None = None  # nobody wants to hear of any
        super().__init__(f"the KV connector {name}")

    def exist(self, keys: Sequence[PageKey]) -> list[bool]:
        until = time.monotonic() + self._patience_s
        while True:
            states = list(called(self._connector.look_up, list(keys)))
            if len(states) != len(keys) or not all(isinstance(each, Lookup) for each in states):
                raise TypeError(f"look_up returned {states!r:.80} for {len(keys)} keys, not a Lookup for each")
            if Lookup.PENDING not in states or time.monotonic() > until:
                return [state is Lookup.HIT for state in states]
            time.sleep(0.02)

    def store(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        kept = list(called(self._connector.save_kv, [self._saving[key]]))
        if len(kept) != 1:
            raise TypeError(f"save_kv returned {kept!r:.80} for one page")
        if not kept[0]:
            raise NotKept

    def save(self, page: KVPage) -> bool:
        key = page.content.key
        self._saving[key] = page
        try:
            return self.put(key, page.buffers)
        finally:
            self._saving.pop(key, None)

    def remove(self, keys: Sequence[PageKey]) -> None:
        called(self._connector.discard, list(keys))

    def disconnect(self) -> None:
        """`GuardedConnector.shutdown` has ended the connector."""

    def fetch(self, key: PageKey) -> Buffer | None:
        raise NotImplementedError  # pages come with loads

    def checked(self, key: PageKey, content: Buffer) -> Buffer:
        raise NotImplementedError

    def noted(self, key: PageKey, is_there: bool) -> None:
        if self._events is not None:
            self._events.note(STORAGE, key, is_there)

    def take_events(self) -> Sequence[TierEvent]:
        if self._events is None:
            with self._changed:
                self._events = TierEventLog()
                for key, answer in self._known.items():
                    if answer.is_there:
                        self._events.note(STORAGE, key, True)
        return self._events.take()

    def seconds_for(self, num_bytes: int) -> float:
        """That a page of so many bytes may take."""
        return self._patience_s + CALL_SECONDS + num_bytes / LEAST_RATE

    def allows_reading(self) -> bool:
        return self._breaker.allows() and self._reads.allows()

    def failed_to_read(self, error: Exception) -> None:
        self._failed(error, self._reads)

    def came(self, key: PageKey, num_bytes: int) -> None:
        """A page was given, and is the right one."""
        self._breaker.succeeded()
        self._reads.succeeded()
        with self._changed:
            self.counters.hits += 1
            self.counters.loaded_bytes += num_bytes

    def came_wrong(self, key: PageKey) -> None:
        """A page was given that is damaged, or another one."""
        with self._changed:
            self.counters.corrupt += 1
        self.delete([key])

    def did_not_come(self, keys: Sequence[PageKey]) -> None:
        with self._changed:
            self.counters.misses += len(keys)
            for key in keys:
                self._learn(key, False)


class GuardedLoad:
    """A load as a connector sees it (`KVLoad`)."""

    def __init__(self, load: KVLoad, connector: GuardedConnector):
        self._load, self._connector, self._pages = load, connector, connector.pages
        self._wanted = {page.key: page for page in load.missing}
        self._lock = threading.Lock()
        self._is_finished = False
        self.until = time.monotonic() + self._patience()

    def _patience(self) -> float:
        return max(map(self._connector.seconds_for, self._wanted.values()), default=0.0)

    @property
    def request_id(self) -> str:
        return self._load.request_id

    @property
    def missing(self) -> Sequence[PageContent]:
        return self._load.missing

    def give(
        self, key: PageKey, page: Buffer | Sequence[Buffer], source: str = "", *, is_checked: bool = False
    ) -> bool:
        """See `KVLoad.give`. Every page is checked, and its source is the connector."""
        if key not in self._wanted or self._is_finished:
            return False
        try:
            whole = joined(page) if isinstance(page, list | tuple) else joined([cast("Buffer", page)])
        except (TypeError, ValueError) as error:
            self._pages.failed_to_read(TypeError(f"give got {page!r:.40}, which is no page: {error}"))
            return False
        is_right = self._load.give(key, whole, self._connector.name)
        if is_right:
            self.until = time.monotonic() + self._patience()
            self._pages.came(key, whole.nbytes)
        elif not self._is_finished:
            self._pages.came_wrong(key)
        return is_right

    def finish(self) -> None:
        with self._lock:
            was_finished, self._is_finished = self._is_finished, True
        if not was_finished:
            if missing := [page.key for page in self._load.missing if page.key in self._wanted]:
                self._pages.did_not_come(missing)
            self._connector.ended(self)
            self._load.finish()


class RequestView:
    """A request as a connector sees it (`KVRequest`) for as long as a call takes; later it raises RuntimeError. A
    thread that comes too late would read what the engine changes meanwhile."""

    def __init__(self, request: KVRequest):
        self._request, self.is_over = request, False

    def _now(self) -> KVRequest:
        if self.is_over:
            raise RuntimeError("a request can be read only within the call that it is given to")
        return self._request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def token_ids(self) -> Sequence[int]:
        return self._now().token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self._now().num_prompt_tokens

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        return self._now().kv_transfer_params

    def num_matched_tokens(self, look_up: LookUp) -> int | None:
        def within_the_call(keys: Sequence[PageKey]) -> Sequence[Lookup]:
            states = look_up(keys)
            self._now()
            return states

        return self._now().num_matched_tokens(within_the_call)

    def prompt_pieces(self) -> Any:
        return self._now().prompt_pieces()

    def save_prompt(self) -> None:
        self._now().save_prompt()


def called(function: Callable[..., Any], *args: Any) -> Any:
    """What a stranger's function returns. Whatever it raises is an Exception: `sys.exit` in it ends nothing."""
    try:
        return function(*args)
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def anything(result: Any) -> bool:
    return True


def is_plain(said: Any) -> bool:
    """Whether something can travel between processes. Raises what msgspec raises where not."""
    return bool(msgspec.msgpack.encode(said)) or True


def is_params(said: Any) -> bool:
    """Whether something can be the `kv_transfer_params` of an output. Raises what msgspec raises where not."""
    return isinstance(said, dict) and bool(msgspec.json.encode(said))


def itemsize_of(dtype: str) -> int:
    return next((each.itemsize for each in DTYPES.values() if each.name == dtype), 4)
