"""The table of compiled programs: zero recompiles by construction.

Every program is lowered from shapes and compiled ahead of time, and only `Compiled` objects are ever called: a
wrong shape, dtype or sharding raises instead of compiling. Threads compile while requests are already served, in
the order and at the times of `CompileQueue`; asking for a program that is not ready moves it to the front, and waits
for it or looks again later.

Several processes that want the same programs compile each of them once (`CompileTurns`): the first one does, the
others wait for it and find it in the compilation cache.

`CompileCounter` counts every compilation of the process, ours or not, so that "no recompile" is measured and not
only intended.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxpaged.errors import ProgramError
from jaxpaged.interrupts import accepted_interrupts
from jaxpaged.messages import ProgramKey, Progress
from jaxpaged.worker.programs.compile_queue import Activity, CompileQueue
from jaxpaged.worker.programs.executables import HIT, LoadedProgram
from jaxpaged.worker.programs.program_index import ProgramIndex

logger = logging.getLogger(__name__)

THREAD_NAME = "jaxpaged-compile"
MOST_THREADS = 4
"""Programs that are compiled at a time, at most."""
TURN_SECONDS = 0.0005
"""How long a thread has the interpreter before another gets it, while programs are prepared: 5 ms in Python. A step
waits for it after each call that gave it away, and lowering a program is seconds of Python: beside one that is lowered,
a step of the embedded model took 10.5 ms in place of 3.6, beside three 44 in place of 14."""
DEVICE_TURN_SECONDS = 0.0001
"""The same where devices compute the steps. Beside the compiling of all programs of an 8B on an H200, whose decode
steps take 4.7 ms, they took 11.5 (median; 23 on average) with turns of 0.5 ms, and 5.1 (8.5) with these. On a CPU the
two could not be told apart."""
LOOK_SECONDS = 0.1
"""How often a thread that lets steps go first looks whether it may go on."""
LASTING_CODES = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "OUT_OF_RANGE")
"""First words of what XLA says of a program that it can never compile. Others are of memory, or of a device."""

TURNS_FOLDER = "turns"
TURN_LOOK_SECONDS = 0.05
"""How often who waits for a turn looks whether it has come."""
LONGEST_WAIT = 600.0
"""Seconds after which a program is compiled without a turn: who has it may have been stopped."""


class CompileCounter:
    """Counts the XLA compilations of this process, through jax.monitoring, until closed.

    Compilations by the threads of `CompiledPrograms` are planned and not counted: what is left are recompiles.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration: float, **_: Any) -> None:
        if event != "/jax/core/compile/backend_compile_duration":
            return
        if not threading.current_thread().name.startswith(THREAD_NAME):
            self.count += 1

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> "CompileCounter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CompileTurns:
    """Turns among all processes that name the same cache `folder` and `purpose`, what their programs depend on. A turn
    is a lock on a file beside the cache, which the system gives back when a process ends, however it does."""

    def __init__(self, folder: str, purpose: Any):
        self._folder = Path(folder) / TURNS_FOLDER
        self._folder.mkdir(exist_ok=True)
        self._name = hashlib.sha256(repr(purpose).encode()).hexdigest()[:16]

    @contextlib.contextmanager
    def turn(self, key: ProgramKey) -> Iterator[None]:
        """Encloses the compiling of a program."""
        with open(self._folder / f"{self._name}-{key.kind}-{key.size}", "ab") as file:
            deadline = time.monotonic() + LONGEST_WAIT
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(TURN_LOOK_SECONDS)
            yield  # to close the file gives the turn back


class CacheHits:
    """Counts programs that came from the compilation cache, of threads whose names begin with `thread_name`."""

    def __init__(self, thread_name: str):
        self._thread_name = thread_name
        self.count = 0
        jax.monitoring.register_event_listener(self._on_event)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == HIT and threading.current_thread().name.startswith(self._thread_name):
            self.count += 1

    def close(self) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)


class ShortTurns:
    """The interpreter's turns are short while any thread of the process prepares programs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_threads, self._before = 0, 0.0

    def begin(self, seconds: float) -> None:
        with self._lock:
            if not self._num_threads:
                self._before = sys.getswitchinterval()
            if seconds < sys.getswitchinterval():  # which is a whole number of microseconds, rounded down
                sys.setswitchinterval(seconds)
            self._num_threads += 1

    def end(self) -> None:
        with self._lock:
            self._num_threads -= 1
            if not self._num_threads:
                sys.setswitchinterval(self._before)


short_turns = ShortTurns()


class CompiledPrograms:
    """key -> compiled program.

    `builders` map a key to a function that lowers the program. They are compiled in the given order, by
    `num_threads` threads, beginning with `start()`; the `first` of them are waited for from the beginning, and the
    others stand back while steps are computed, if these share the cores. `activity` is to be told of steps. Those in
    `stored` are not compiled: their function loads them. Those in `on_demand` are left out until they are wanted; those
    in `rare`, which only requests out of the ordinary need, come after the others. `turn` encloses compiling, and
    `index` knows programs that were compiled before. `row_shares` is of `CompileQueue`.
    """

    def __init__(
        self,
        builders: dict[ProgramKey, Callable[[], jax.stages.Lowered]],
        num_threads: int | None = None,
        progress: Progress | None = None,
        stored: Mapping[ProgramKey, Callable[[], Any]] = MappingProxyType({}),
        on_demand: Collection[ProgramKey] = (),
        rare: Collection[ProgramKey] = (),
        first: int = 0,
        shares_cores: bool = False,
        turn: Callable[[ProgramKey], AbstractContextManager[None]] = nullcontext,
        index: ProgramIndex | None = None,
        row_shares: Mapping[str, float] = MappingProxyType({}),
    ):
        self.builders, self.stored, self._turn, self._index = builders, stored, turn, index
        self.progress = progress or (lambda stage, done, total: None)
        self.num_threads = num_threads or min(MOST_THREADS, os.cpu_count() or 1)
        self.seconds: dict[ProgramKey, float] = {}
        self.seconds_waited = 0.0  # by whoever asked for a program that was not ready
        self._unwanted = set(on_demand)
        wanted = [key for key in builders if key not in self._unwanted]
        self.activity = Activity(shares_cores)
        in_order, most_unhurried = sorted(wanted, key=lambda key: key in rare), max(self.num_threads - 1, 1)
        loaded = frozenset(stored) | (index.known(builders) if index else frozenset())
        self._queue = CompileQueue(in_order, first, most_unhurried, self.activity, loaded, row_shares)
        self.ordinary = tuple(key for key in wanted if key not in rare)
        self._first = [key for key in in_order[:first] if key not in loaded]
        self._traced: dict[ProgramKey, jax.stages.Lowered] = {}  # and not compiled yet
        self.failure: ProgramError | None = None
        """Why no request can be served, if one of `ordinary` can never be compiled."""
        self.num_workers = 0
        """Threads that compile, or wait to: while there are any, `activity` is to be told of steps."""
        self._begun: list[ProgramKey] = []
        self._done: dict[ProgramKey, Any] = {}
        self.callable: dict[ProgramKey, Any] = {}
        """Programs that were called before: the others are asked for by `[]`."""
        self._changed = threading.Condition()
        self._lowering = threading.Lock()  # one at a time: side by side, each takes as much longer
        self._stopped = False

    def start(self) -> None:
        """Begin to compile in the background."""
        self.progress("programs", 0, self.num_wanted)
        with self._changed:
            for _ in range(self.num_threads):
                self._add_worker()

    def trace_first(self) -> None:
        """Find out before any request whether the programs that it will wait for first can be made of this model and
        these options. Raises ProgramError."""
        for key in self._first:
            if key not in self._done:
                try:
                    self._lowered(key)
                except Exception as error:
                    self._verdict(key, error)
        if self.failure is not None:
            raise self.failure

    def _add_worker(self) -> None:
        """Start a thread that ends with the queue. The lock is held."""
        short_turns.begin(TURN_SECONDS if self.activity.shares_cores else DEVICE_TURN_SECONDS)
        self.num_workers += 1
        threading.Thread(target=self._work, name=f"{THREAD_NAME}-{self.num_workers}").start()

    def is_ready(self, key: ProgramKey) -> bool:
        """Whether a program can be called without waiting. One that is kept on demand is wanted from now on."""
        if key in self._done:
            return not isinstance(self._done[key], BaseException)
        with self._changed:
            self._want(key)
        return False

    def has(self, key: ProgramKey) -> bool:
        """Whether a program can be called without waiting; asking does not make it wanted."""
        return not isinstance(self._done.get(key, KeyError()), BaseException)

    def prepare(self, key: ProgramKey) -> bool:
        """The same for a program that somebody waits for: it goes to the front. Raises what its compilation raised."""
        program = self._done.get(key)
        if isinstance(program, BaseException):
            raise program
        if program is None:
            self._hurry([key])
        return program is not None

    def _hurry(self, keys: Sequence[ProgramKey]) -> None:
        """Compile programs next, the first one first."""
        with self._changed:
            for key in reversed(keys):
                self._want(key)
                self._queue.hurry(key)
            self._changed.notify_all()

    def _want(self, key: ProgramKey) -> None:
        """Queue a program that was kept on demand. The lock is held."""
        if key in self._unwanted and not self._stopped:
            self._unwanted.remove(key)
            self._queue.add(key)
            if not self.num_workers:
                self.activity.listen_again()
                self._add_worker()

    def __getitem__(self, key: ProgramKey) -> Any:
        """The program, waiting for it if needed. Raises what its compilation raised."""
        program = self._done.get(key)
        if program is None:
            program = self._wait(key)
        if isinstance(program, BaseException):
            raise program
        if isinstance(program, LoadedProgram):
            program = program.compiled or program  # which is compiled from its first call on
        if not isinstance(program, LoadedProgram):
            self.callable[key] = program
        return program

    def smallest_ready(self, kind: str, size: int, buckets: Sequence[int]) -> int:
        """The bucket to use for `size`: the smallest that is compiled, else the first that a thread began with.

        If nobody has begun with one that fits, it is the smallest.
        """
        fitting = [bucket for bucket in buckets if bucket >= size]
        assert fitting, f"a {kind} step of size {size} is larger than the largest bucket {buckets[-1]}"
        if ProgramKey(kind, fitting[0]) in self._done:
            return fitting[0]
        ready = next((bucket for bucket in fitting if ProgramKey(kind, bucket) in self._done), None)
        if ready is not None:
            with self._changed:
                self._queue.pad(ProgramKey(kind, fitting[0]))
            return ready
        return self._first_begun(kind, fitting) or fitting[0]

    def largest_usable(self, kind: str, buckets: Sequence[int]) -> int:
        """The largest bucket that is compiled, else the first that a thread began with, else the largest of all."""
        ready = next((bucket for bucket in reversed(buckets) if ProgramKey(kind, bucket) in self._done), None)
        if ready is not None:
            return ready
        return self._first_begun(kind, buckets) or buckets[-1]

    def _first_begun(self, kind: str, buckets: Sequence[int]) -> int | None:
        """The first of the buckets that a thread began with, if any did."""
        return next((key.size for key in tuple(self._begun) if key.kind == kind and key.size in buckets), None)

    def miss(self, key: ProgramKey, num_tokens: int) -> None:
        """So many tokens took a step of their own for want of a program."""
        with self._changed:
            self._queue.miss(key, num_tokens)

    def miss_seconds(self, key: ProgramKey, seconds: float) -> None:
        """A step took so much longer for want of a program."""
        with self._changed:
            self._queue.miss_seconds(key, seconds)

    def wait_all(self, on_demand: bool = False) -> dict[ProgramKey, Any]:
        """Every program, once all are compiled; `on_demand`: also those that nobody has wanted yet."""
        keys = [key for key in self.builders if on_demand or key not in self._unwanted]
        self._hurry(sorted(keys, key=lambda key: key not in self.ordinary))
        return {key: self[key] for key in keys}

    @property
    def num_wanted(self) -> int:
        """Programs that are ready or will be without further asking."""
        return len(self.builders) - len(self._unwanted)

    @property
    def states(self) -> list[tuple[str, int, str]]:
        """Kind, size and state of every program that is wanted: "ready", "failed", "compiling" or "queued"."""
        begun = frozenset(tuple(self._begun))
        states = []
        for key in self.builders:
            if key in self._done:
                state = "failed" if isinstance(self._done[key], BaseException) else "ready"
            elif key in self._unwanted:
                continue
            else:
                state = "compiling" if key in begun else "queued"
            states.append((*key, state))
        return states

    def ready(self) -> list[ProgramKey]:
        """The programs that can be called."""
        return [key for key, program in tuple(self._done.items()) if not isinstance(program, BaseException)]

    @property
    def num_ready(self) -> int:
        return len(self._done)

    @property
    def num_ordinary_ready(self) -> int:
        """How many of `ordinary` can be called."""
        ready = (self._done.get(key) for key in self.ordinary)
        return sum(program is not None and not isinstance(program, BaseException) for program in ready)

    def stop(self) -> None:
        """Compile nothing more. Programs that are being compiled are finished."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def _wait(self, key: ProgramKey) -> Any:
        begin = time.perf_counter()
        self._hurry([key])
        with self._changed:
            while key not in self._done:
                if self._stopped:
                    raise RuntimeError(f"program {key} was asked for after the engine was shut down")
                with accepted_interrupts():
                    self._changed.wait()
            self.seconds_waited += time.perf_counter() - begin
            return self._done[key]

    def _next(self) -> ProgramKey | None:
        """The program to prepare, as soon as one may be; None once there is none."""
        with self._changed:
            # Threads are not daemons: killing one inside XLA crashes the process. They end with the main thread.
            while self._queue and threading.main_thread().is_alive():
                if (key := self._queue.take()) is not None:
                    self._begun.append(key)
                    return key
                self._changed.wait(LOOK_SECONDS)
            self.num_workers -= 1
            short_turns.end()
            return None

    def _compiled(self, key: ProgramKey) -> Any:
        if self._index and (program := self._index.load(key)) is not None:
            return program
        lowered = self._lowered(key)
        with self._turn(key):
            program = self._index.compile(key, lowered) if self._index else lowered.compile()
        self._traced.pop(key, None)
        return program

    def _lowered(self, key: ProgramKey) -> jax.stages.Lowered:
        """A program before it is compiled, traced once."""
        with self._lowering:
            if key not in self._traced:
                self._traced[key] = self.builders[key]()
            return self._traced[key]

    def _verdict(self, key: ProgramKey, error: BaseException) -> BaseException:
        """What whoever needs a program that failed is told. Without an ordinary one nothing can be served, ever: that
        is a sentence, and what led to it is for --debug."""
        if key not in self.ordinary or not lasts(error):
            logger.error("could not prepare %s for bucket %d", key.kind, key.size, exc_info=error)
            return error
        logger.debug("could not prepare %s for bucket %d", key.kind, key.size, exc_info=error)
        self.failure = self.failure or ProgramError(
            f"the model cannot run with these options: program {key.kind} of size {key.size} cannot be compiled: "
            f"{in_words(error)} Another dtype, quantization or attention_backend may do. --debug shows what led to it; "
            "please report that, unless it is your own logits processor."
        )
        return self.failure

    def _work(self) -> None:
        while (key := self._next()) is not None:
            begin = time.monotonic()
            try:
                program = self.stored[key]() if key in self.stored else self._compiled(key)
            except BaseException as error:
                program = self._verdict(key, error)
            with self._changed:
                if key not in self.stored:
                    self.seconds[key] = time.monotonic() - begin
                self._done[key] = program
                self._queue.done(key)
                num_ready = len(self._done)
                self._changed.notify_all()
            logger.debug("%s of size %d is ready after %.2f s", key.kind, key.size, time.monotonic() - begin)
            self.progress("programs", num_ready, self.num_wanted)
        if not self.num_workers:
            return_freed_memory()


def lasts(error: BaseException) -> bool:
    """Whether a program that failed with this would fail again."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return str(error).startswith(LASTING_CODES)
    return isinstance(error, Exception) and not isinstance(error, MemoryError | OSError)


def in_words(error: BaseException) -> str:
    """The first line of what an error says, as a sentence."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return line if line.endswith(".") else f"{line}."


def return_freed_memory() -> None:
    """Give the system back what compiling has allocated and freed, which glibc keeps for later: more than a quarter of
    the process after the embedded model's start (937 MiB, then 674). It takes some 50 ms, without the interpreter lock.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def enable_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs in `folder` between runs; None: the user's cache folder, "off": nowhere.

    A folder that cannot be written is a warning: everything works, only slower at the next start.
    """
    if folder == "off":
        use_cache_folder(None)
        return
    path = Path(folder) if folder else default_cache_folder()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        logger.warning("compiled programs are not kept: cannot write %s (%s)", path, error.strerror)
        use_cache_folder(None)
        return
    use_cache_folder(str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def use_cache_folder(path: str | None) -> None:
    """jax opens its cache once: another folder, or none, needs a reset.

    So does what it keeps in memory. A program that came from the old folder has lost the code that a bundle stores, and
    whoever compiles it again would get that one.
    """
    if jax.config.jax_compilation_cache_dir != path:
        jax.config.update("jax_compilation_cache_dir", path)
        reset_cache()
        jax.clear_caches()


def default_cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxpaged" / "xla"
