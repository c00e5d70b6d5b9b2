"""The other processes of an engine, as the one that drives them sees them: who they are, how they are, what is ready.

All of them run the same worker with the same options and get the same steps in the same order, and each launches the
programs that the step names. Results are the same everywhere, and the driver reads its own. What becomes of a step on
one of them alone, or of a process itself, ends the group: who started it starts another one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import zmq

from jaxpaged.distributed.channel import SILENCE_SECONDS, DriverEnd, LostError, bracketed
from jaxpaged.distributed.group import Membership, join
from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.errors import CheckpointError, ConfigError, EngineDeadError, JaxpagedError, error_named
from jaxpaged.executor.group_messages import (
    Alive,
    Ask,
    Broken,
    Command,
    Hello,
    Loaded,
    ReadLoRA,
    Reply,
    Report,
    Settled,
    Sized,
    Stop,
    Want,
    Welcome,
)
from jaxpaged.messages import LoRAInfo, LoRARequest, ProgramKey, Progress

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
TELL_SECONDS = 10.0
"""How often the log says for whom a group waits."""
ASK_AGAIN_SECONDS = 2.0
MOMENT_SECONDS = 1.0
"""How long after a collective that fails it may take until it is known who has ended."""
GRACE_SECONDS = 5.0
"""How long the driver may take to end by itself after it has lost somebody: it may wait for a collective for ever."""
WORK_SECONDS = 3600.0
"""How long one process may wait for what another one does, which lives: reading weights and compiling take long."""
CLOSE_SECONDS = 10.0
"""How long closing waits for a thread that sees within `LOOK_SECONDS` that it is to end."""


def end_process() -> None:
    """Without the interpreter's cleaning up: the main thread may wait for a device that never answers."""
    os._exit(1)


class Group:
    """`size` processes, this one included, which has rank 0. The others find it at `host`, at two ports from `port` on,
    or at free ones. `last_resort` says why, and ends this process, if it does not end itself. `release` gives back what
    was borrowed for the others, after they were told to end.

    A thread hears the others; everything else is for the thread that drives, but what it asks `beside` its steps.
    Raises ConfigError when the address cannot be used.
    """

    def __init__(
        self,
        size: int,
        host: str,
        port: int | None,
        secret: bytes,
        progress: Progress,
        last_resort: Callable[[JaxpagedError], None],
        release: Callable[[], None] = lambda: None,
    ):
        try:
            self._end = DriverEnd(host, port, secret)
        except zmq.ZMQError as error:
            at = f"{host}, ports {port} and {port + 1}" if port else host
            raise ConfigError(f"cannot listen at {at}: {error.strerror}. Choose another address or port.") from error
        self.addresses = addresses_of(host, *self._end.ports)
        self._progress, self._last_resort, self._release = progress, last_resort, release
        self.ranks = range(1, size)
        self.failure: JaxpagedError | None = None
        self._changed = threading.Condition()
        self._hellos: dict[int, Hello] = {}
        self._processes: dict[int, bytes] = {}  # which one each rank is: others of that name are of another group
        self._gathered = False
        self._loaded: set[int] = set()
        self._heard: dict[int, float] = {}
        self._sizes: dict[int, int] = {}
        self._ready: dict[int, set[ProgramKey]] = {rank: set() for rank in self.ranks}
        self._replies: dict[tuple[int, int], Reply] = {}
        self._call_ids = count(1)
        self._wanted: set[tuple[ProgramKey, bool]] = set()
        self._encoder, self._sending = FrameEncoder(), threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="group", daemon=True)
        self._thread.start()

    # ---- start

    def gather(self, given: dict[str, str], seconds: float) -> None:
        """Wait until all others have arrived. Raises EngineDeadError, naming who is missing, and ConfigError when what
        they were given differs from what was given here, or when two say that they are the same."""
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in self.ranks if rank not in self._hellos]:
            left = deadline - time.monotonic()
            names = ", ".join(map(str, missing))
            if left <= 0:
                raise EngineDeadError(
                    f"rank {names} of {len(self.ranks) + 1} did not arrive within {seconds:g} s. Look at its log, and "
                    f"whether it can reach {' and '.join(self.addresses)} and has the same secret."
                )
            self._wait(lambda missing=missing: any(rank in self._hellos for rank in missing), min(left, TELL_SECONDS))
            if any(rank not in self._hellos for rank in missing):
                logger.info("waiting for rank %s of %d", names, len(self.ranks) + 1)
        with self._changed:
            self._gathered = True
        for hello in self._hellos.values():
            check_same(given, hello)

    def join(self, options: dict[str, Any], coordinator: str, one_device: bool, seconds: float) -> None:
        """Tell all what they are part of, and become part of it within `seconds`: see `distributed.group.Membership`.
        Raises EngineError."""
        for rank in (*self.ranks, 0):
            member = Membership(coordinator, len(self.ranks) + 1, rank, one_device)
            if rank:
                self._send((rank,), Welcome(options, member))
            else:
                join(member, seconds, late=self.fail)

    def settle_blocks(self, num_blocks: int) -> int:
        """How many KV blocks fit everywhere, if it is `num_blocks` here."""
        self._wait_for_all("say how many KV blocks fit", lambda rank: rank in self._sizes)
        least = min(num_blocks, *self._sizes.values())
        self.tell(Settled(least))
        return least

    def wait_until_loaded(self) -> None:
        """Return when all others can compute. Raises what keeps one of them from it."""
        self._wait_for_all("load", lambda rank: rank in self._loaded)

    # ---- work

    def tell(self, command: Command) -> None:
        """Say something to all. Raises EngineDeadError when the group has lost somebody."""
        self._send(self.ranks, command)

    def ask[R](
        self,
        method: str,
        arguments: Iterable[Any],
        own: Callable[[], R],
        *,
        returns: bool = False,
        beside: bool = False,
    ) -> list[R]:
        """Call a method of every worker; `own` is that of this process. The results, by rank, if others are to say
        theirs (`returns`). `beside`: steps go on, and any thread may ask. Raises what one of them raised."""
        question = Ask(next(self._call_ids), method, list(arguments), returns, beside)
        result, replies = self._ask(question, f"end {method}", own)
        return [result, *(reply.result for reply in replies)] if returns else [result]

    def read_lora(self, request: LoRARequest, own: Callable[[], LoRAInfo]) -> LoRAInfo:
        """Have every worker read an adapter, beside steps; `own` is that of this process. For any thread. Raises what
        one of them raised, and CheckpointError where their files differ."""

        def read() -> LoRAInfo:
            try:
                return own()
            except CheckpointError as error:
                raise CheckpointError(f"{self.name(0)}: {error}") from error

        info, replies = self._ask(ReadLoRA(next(self._call_ids), request), f"read {request.lora_path}", read)
        for reply in replies:
            if reply.result != info.digest:
                raise CheckpointError(
                    f"{request.lora_path}: the files of the adapter have the digest {info.digest} where rank 0 reads "
                    f"them, and {reply.result} at {self.name(reply.rank)}. Copy the same ones to all hosts."
                )
        return info

    def _ask[R](self, question: Ask | ReadLoRA, what: str, own: Callable[[], R]) -> tuple[R, list[Reply]]:
        """What `own` returns, and what the others reply once they have done so, too. Raises what one of them raised."""
        self.tell(question)
        try:
            result = own()
        finally:
            self._wait_for_all(what, lambda rank: (rank, question.call_id) in self._replies)
            replies = [self._replies.pop((rank, question.call_id)) for rank in self.ranks]
        for reply in replies:
            if reply.error is not None:
                kind, words = reply.error
                raise error_named(kind, f"{self.name(reply.rank)}: {words}")
        return result, replies

    def is_ready(self, key: ProgramKey) -> bool:
        """Whether the others have a program."""
        return all(key in ready for ready in self._ready.values())

    def wait_until_ready(self, keys: Iterable[ProgramKey]) -> None:
        """Return when the others have programs, which they hurry to compile: in a program that needs all of them, who
        comes first waits for the last no longer than the collectives of its platform do. Raises what ended the group,
        also when that takes longer than `WORK_SECONDS`."""
        deadline = time.monotonic() + WORK_SECONDS
        while missing := [key for key in keys if not self.is_ready(key)]:
            for key in missing:  # said again and again: a process that could not compile it fails when it hears it
                self.tell(Want(key, hurry=True))
            if time.monotonic() > deadline:
                first = missing[0]
                has = lambda rank, first=first: first in self._ready[rank]
                self._give_up(f"compile the program {first.kind} {first.size}", has)
            self._wait(lambda missing=missing: all(map(self.is_ready, missing)), ASK_AGAIN_SECONDS)

    def want(self, key: ProgramKey, hurry: bool) -> None:
        """See `Want`; said once."""
        if (key, hurry) not in self._wanted:
            self._wanted.add((key, hurry))
            self.tell(Want(key, hurry))

    # ---- end

    def check(self) -> None:
        """Raises EngineDeadError when the group has lost somebody, or was closed."""
        if self.failure is not None:
            raise EngineDeadError(str(self.failure)) from self.failure
        if self._closed:
            raise EngineDeadError("the engine has ended.")

    def fail_soon(self, error: JaxpagedError) -> None:
        """The group cannot go on for what ended one of the others, if that is known in a moment, else for `error`."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, MOMENT_SECONDS)
        self.fail(error)

    def fail(self, error: JaxpagedError) -> None:
        """The group cannot go on. For any thread; only the first time counts."""
        with self._changed:
            if self.failure is not None or self._closed:
                return
            self.failure = error
            self._changed.notify_all()
        logger.error("the processes of this engine end: %s", error)
        threading.Thread(target=self._end_late, name="group end", daemon=True).start()

    def close(self, reason: str = "") -> None:
        """Let the others end; `reason`: what ended the group, if it is not its failure. A second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        with self._sending:
            stop = self._encoder.encode(Stop(reason or str(self.failure or "")))
            for rank in self._hellos.keys() & set(self.ranks):
                with contextlib.suppress(LostError):  # it has left before
                    self._end.send((rank,), stop, MOMENT_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():  # which uses the sockets
            logger.error(
                "the thread that hears the other processes did not end within %g s: its ports stay open until "
                "this process ends",
                CLOSE_SECONDS,
            )
        else:
            self._end.close(linger=1.0)
        self._release()

    def _end_late(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed, GRACE_SECONDS) and self.failure is not None:
                self._last_resort(self.failure)

    def _send(self, ranks: Iterable[int], command: Command) -> None:
        try:
            with self._sending:
                self.check()  # the sockets may be closed
                self._end.send(ranks, self._encoder.encode(command))
        except LostError as error:  # who has started it knows why, and says so in a moment
            self.fail_soon(EngineDeadError(f"{self.name(error.rank)} has left, or its host cannot be reached"))
            self.check()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Until `ready()`, or for so long; whether it is. Raises what ended the group meanwhile."""
        with self._changed:
            is_ready = self._changed.wait_for(lambda: ready() or self.failure is not None or self._closed, seconds)
        if self.failure is not None:
            raise self.failure
        self.check()
        return is_ready

    def _wait_for_all(self, what: str, done: Callable[[int], bool]) -> None:
        """Until every other rank has `done` what it is to do. Raises what ended the group meanwhile, and ends it when
        one takes longer than `WORK_SECONDS`."""
        if not self._wait(lambda: all(map(done, self.ranks)), WORK_SECONDS):
            self._give_up(what, done)

    def _give_up(self, what: str, done: Callable[[int], bool]) -> None:
        late = " and ".join(self.name(rank) for rank in self.ranks if not done(rank))
        self.fail(
            EngineDeadError(f"{late} did not {what} within {WORK_SECONDS:g} s, though alive. Look at the log there.")
        )
        self.check()

    # ---- the thread

    def _listen(self) -> None:
        decoder = FrameDecoder(Report)
        try:
            while not self._closed:
                frames = self._end.receive(LOOK_SECONDS)
                if frames is not None:
                    self._hear(decoder, frames)
                self._look_for_silent()
        except Exception as error:  # otherwise a caller that waits for a report would wait for ever
            self.fail(EngineDeadError(f"the thread that hears the other processes broke down: {error!r}"))
            raise

    def _hear(self, decoder: FrameDecoder, frames: list[bytes]) -> None:
        """A report. Before it stands which process says it: those of a group before this one may not have ended yet."""
        process, *rest = frames
        try:
            report = decoder.decode(rest)
        except ValueError as error:
            self._refuse(
                f"a process that knows the secret says what this one cannot read ({error}). Install the same "
                "version of jaxpaged on all hosts."
            )
            return
        if isinstance(report, Hello) and not self._admit(report, process):
            return
        if self._processes.get(report.rank) == process:
            self._note(report)

    def _admit(self, hello: Hello, process: bytes) -> bool:
        """Whether a process that arrives may take part."""
        before = self._hellos.get(hello.rank)
        if hello.rank not in self.ranks:
            self._refuse(
                f"{hello.where} says that it is rank {hello.rank}, but there are {len(self.ranks) + 1} processes, of "
                f"ranks 0 to {len(self.ranks)}. Give all hosts the same nnodes, and each a node_rank of its own."
            )
        elif before is not None and host_of(before.where) != host_of(hello.where):
            self._refuse(
                f"two say that they are rank {hello.rank}: {before.where}, and {hello.where}. Give each host a "
                "node_rank of its own."
            )
        elif before is not None and self._gathered:
            self.fail(EngineDeadError(f"{self.name(hello.rank)} has ended, and {hello.where} came in its place"))
        else:
            self._processes[hello.rank] = process
            return True
        return False

    def _refuse(self, reason: str) -> None:
        """Somebody cannot take part: that ends a group for which others are waited, and no other."""
        if self._gathered:
            logger.warning("not heard: %s", reason)
        else:
            self.fail(ConfigError(reason))

    def _note(self, report: Report) -> None:
        with self._changed:
            self._heard[report.rank] = time.monotonic()
            if isinstance(report, Hello):
                self._hellos[report.rank] = report
            elif isinstance(report, Sized):
                self._sizes[report.rank] = report.num_blocks
            elif isinstance(report, Loaded):
                self._loaded.add(report.rank)
            elif isinstance(report, Reply):
                self._replies[report.rank, report.call_id] = report
            elif isinstance(report, Alive):
                self._ready[report.rank].update(report.ready)
            self._changed.notify_all()
        if isinstance(report, Broken):
            self.fail(error_named(report.error, f"{self.name(report.rank)}: {report.message}"))
        elif isinstance(report, Alive) and report.ready:
            self._progress("programs", len(self._ready[report.rank]), len(self._ready[report.rank]))

    def _look_for_silent(self) -> None:
        before = time.monotonic() - SILENCE_SECONDS
        for rank, heard in self._heard.items():
            if heard < before:
                reason = f"{self.name(rank)} has given no sign of life for {SILENCE_SECONDS:g} s"
                self.fail(EngineDeadError(f"{reason}. It was stopped, or its host cannot be reached."))

    def name(self, rank: int) -> str:
        hello = self._hellos.get(rank)
        return f"rank {rank} ({hello.where})" if hello else f"rank {rank}"


def addresses_of(host: str, commands: int, reports: int) -> tuple[str, str]:
    """Where a driver listens, at two ports."""
    return f"tcp://{bracketed(host)}:{commands}", f"tcp://{bracketed(host)}:{reports}"


def host_of(where: str) -> str:
    """Of "process 123 of host b"."""
    return where.rpartition(" of ")[2]


def check_same(given: dict[str, str], hello: Hello) -> None:
    """Raise ConfigError for the first thing that a process was given otherwise than this one."""
    for name in sorted(given.keys() | hello.given.keys()):
        here, there = given.get(name, "missing"), hello.given.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"rank {hello.rank} ({hello.where}) has {name} {there}, and rank 0 has {here}. All must have the same."
            )
