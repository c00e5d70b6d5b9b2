"""What a process does that follows: it runs the steps that the driver tells of, and says how it is. See `group.py`."""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.channel import FollowerEnd
from jaxpaged.distributed.group import join
from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.errors import EngineDeadError, EngineError, JaxpagedError
from jaxpaged.executor.group import CLOSE_SECONDS, WORK_SECONDS, end_process
from jaxpaged.executor.group_messages import (
    Alive,
    Ask,
    Broken,
    Command,
    DropLoRA,
    Hello,
    Loaded,
    ReadLoRA,
    Reply,
    Report,
    Sample,
    Settled,
    Sized,
    Step,
    Stop,
    Want,
    Welcome,
)
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import ProgramKey
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.worker.model_runner import PendingStep

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 0.5
STEPS_IN_FLIGHT = 2
IDLE_SECONDS = 0.02
"""After so long without a command, what was dispatched is awaited."""

Resolve = Callable[[EngineConfig], tuple[Path, Model, DecoderConfig, EngineConfig]]


class UnansweredError(EngineDeadError):
    """Nobody drives there."""


class Post:
    """The messages of follower `rank`, both ways. `addresses` are those of commands and of reports."""

    def __init__(self, rank: int, addresses: tuple[str, str], secret: bytes):
        self.rank, self._end = rank, FollowerEnd(rank, addresses, secret)
        self._encoder, self._decoder = FrameEncoder(), FrameDecoder(Command)
        self._encoding = threading.Lock()
        self._driver = " and ".join(addresses)
        self._process = secrets.token_bytes(8)  # nobody else's, and no rank's before this one
        self.wait_until_lost, self.close = self._end.wait_until_lost, self._end.close

    def say(self, report: Report) -> None:
        with self._encoding:
            self._end.send([self._process, *[bytes(frame) for frame in self._encoder.encode(report)]])

    def hear(self, seconds: float) -> Command | None:
        """The next command, if one comes in time."""
        frames = self._end.receive(seconds)
        return None if frames is None else self._decoder.decode(frames)

    def expect[C](self, kind: type[C], seconds: float) -> C:
        """The next command, which must be of a kind. Raises EngineDeadError, UnansweredError if none comes."""
        command = self.hear(seconds)
        if isinstance(command, kind):
            return command
        if isinstance(command, Stop):
            raise EngineDeadError(f"rank 0 has ended: {command.reason or 'it was told to'}")
        if command is not None:
            raise EngineDeadError(f"rank 0 said {type(command).__name__}, and not {kind.__name__}")
        raise UnansweredError(
            f"rank {self.rank} waited {seconds:g} s for rank 0 at {self._driver}, and nothing came. Look at its log, "
            "whether this host can reach those addresses, and whether both have the same secret."
        )

    def settle_blocks(self, num_blocks: int, seconds: float) -> int:
        """How many KV blocks fit everywhere, if it is `num_blocks` here."""
        self.say(Sized(self.rank, num_blocks))
        return self.expect(Settled, seconds).num_blocks


class SignsOfLife:
    """A thread that says again and again that this process lives, and which programs it has."""

    def __init__(self, post: Post):
        self._post = post
        self._ready: Callable[[], list[ProgramKey]] = list
        self._told: set[ProgramKey] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="signs of life", daemon=True)
        self._thread.start()

    def watch(self, ready: Callable[[], list[ProgramKey]]) -> None:
        """`ready`: the programs that can be called."""
        self._ready = ready

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(ALIVE_SECONDS):
            new = [key for key in self._ready() if key not in self._told]
            self._told.update(new)
            self._post.say(Alive(self._post.rank, new))


class Follower:
    """Does what it hears until it is told to stop. `executor` is that of this process alone."""

    def __init__(self, post: Post, executor: UniProcExecutor):
        self._post, self._executor = post, executor
        self._pending: deque[PendingStep] = deque()

    def run(self) -> None:
        """Raises what a step raises: then the group is at its end."""
        while True:
            command = self._post.hear(IDLE_SECONDS if self._pending else 3600.0)
            if command is None:
                if self._pending:
                    self._pending.popleft().result()
            elif isinstance(command, Stop):
                return
            else:
                self._do(command)

    def _do(self, command: Command) -> None:
        if isinstance(command, Step):
            while len(self._pending) >= STEPS_IN_FLIGHT:
                self._pending.popleft().result()
            pending = self._executor.worker.runner.execute_model(command.scheduled)
            if not command.scheduled.masked:  # or its result comes from `sample_tokens`
                self._pending.append(pending)
        elif isinstance(command, Sample):
            self._pending.append(self._executor.worker.runner.sample_tokens(command.masks_NW))
        elif isinstance(command, Want):
            programs = self._executor.worker.programs
            programs.prepare(command.key) if command.hurry else programs.is_ready(command.key)
        elif isinstance(command, Ask) and command.beside:
            self._answer_beside(command, lambda: self._call(command))
        elif isinstance(command, Ask):
            while self._pending:
                self._pending.popleft().result()
            self._answer(command, lambda: self._call(command))
        elif isinstance(command, ReadLoRA):
            self._answer_beside(command, lambda: self._executor.worker.read_lora(command.request).digest)
        elif isinstance(command, DropLoRA):
            self._executor.worker.drop_lora(command.lora_int_id)

    def _call(self, ask: Ask) -> Any:
        result = getattr(self._executor.worker, ask.method)(*ask.arguments)
        return result if ask.returns else None

    def _answer_beside(self, *answering: Any) -> None:
        """`_answer` in a thread."""
        threading.Thread(target=self._answer, args=answering, name="reader", daemon=True).start()

    def _answer(self, question: Ask | ReadLoRA, answer: Callable[[], Any]) -> None:
        """Say what `answer` returns, or raises."""
        result = error = None
        try:
            result = answer()
        except Exception as raised:
            if not isinstance(raised, JaxpagedError):
                logger.exception("%r failed", question)
            error = (type(raised).__name__, str(raised))
        self._post.say(Reply(self._post.rank, question.call_id, error, result))


def leave_late(post: Post, error: EngineError) -> None:
    """Tell the driver, and end this process, which waits for others that do not come, and cannot be interrupted."""
    logger.error("rank %d ends: %s", post.rank, error)
    post.say(Broken(post.rank, type(error).__name__, str(error)))
    post.close()
    end_process()


def follow(post: Post, where: str, given: dict[str, str], resolve: Resolve, join_seconds: float) -> None:
    """Arrive, join within `join_seconds`, load, and do what is heard until the driver says that it is over. `resolve`
    finds the model of a configuration. Raises whatever stops it; the driver has been told."""
    post.say(Hello(post.rank, where, given))
    signs = SignsOfLife(post)  # from now on: the driver may wait for others for long
    try:
        welcome = post.expect(Welcome, join_seconds)
        join(welcome.member, join_seconds, late=lambda error: leave_late(post, error))
        folder, model, decoder, config = resolve(EngineConfig.from_options(**welcome.options))
        settle = lambda num_blocks: post.settle_blocks(num_blocks, WORK_SECONDS)
        executor = UniProcExecutor(config, model, decoder, folder, settle_blocks=settle)
        signs.watch(executor.worker.programs.ready)
        post.say(Loaded(post.rank))
        Follower(post, executor).run()
    except BaseException as error:
        post.say(Broken(post.rank, type(error).__name__, str(error) or repr(error)))
        raise
    finally:
        signs.stop()
