"""The processes of soak_pairs.py, and what it does to them while clients ask.

    killed prefill, killed decode      SIGKILL of a server; its core must end with it, and it is started again
    stopped prefill, stopped decode    SIGSTOP of a server and its core, and SIGCONT after some seconds
    killed core                        SIGKILL of the core of a decode engine, which its server replaces
    damaged pages, lost pages          on the disk that all engines share: bytes are changed, the folder is emptied

Whoever computes prompts may come and go, and pages may be lost, without that any client notices. Only a killed decode
engine, or its core, may be noticed, as `excuses` says: by those whose answers break off.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from server_process import LOOPBACK, Server, children, listening
from soak_clients import Places, Refused, ask
from soak_faults import Fault

BROKEN = {"500", "502", "503", "closed", "torn (the stream has no end)"}
"""What a client may get whose decode engine was killed, or that comes while none is there."""
STOPPED_SECONDS = (2.0, 8.0)
DEATH_SECONDS, RECOVERY_SECONDS = 10.0, 180.0
MOST_DAMAGED = 30


class Process:
    """`jaxpaged serve` or `jaxpaged proxy` at a port that it keeps, with a folder of its own for temporary files."""

    def __init__(self, name: str, folder: Path, command: list[str]):
        self.name, self.folder, self.port = name, folder / name.replace(" ", "-"), free_port()
        self.folder.mkdir()
        self._command = [sys.executable, "-m", "jaxpaged", *command, "--host", LOOPBACK, "--port", str(self.port)]
        self.started: Server | None = None
        self.num_kills, self.logs = 0, ""

    async def start(self) -> None:
        """Start it, and wait until it says that it listens. Ends this program when it does not."""
        log = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - it is closed when the process has ended
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        try:
            self.started = await asyncio.to_thread(listening, process, log)
        except BaseException:  # such as Ctrl-C before it listens: nobody else knows of it
            process.kill()
            process.wait()
            raise

    def pids(self) -> list[int]:
        """Its process and those that it started."""
        return [self.started.pid, *children(self.started.pid)] if self.started is not None else []

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ended(self) -> None:
        """Reap the process and keep its log."""
        if self.started is not None:
            self.started.process.wait()
            self.logs += self.started.logged()
            self.started.log.close()
            self.started = None

    def stop(self) -> None:
        """End it as a person would, and by force where it does not end so."""
        if self.started is None:
            return
        self.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            self.started.process.send_signal(signal.SIGINT)
        try:
            self.started.process.wait(60.0)
        except subprocess.TimeoutExpired:
            self.logs += f"Traceback: {self.name} did not end by itself\n"
            self.signal(signal.SIGKILL)
        self.ended()


class Pairs:
    """Two engines that compute prompts, two that generate, and the proxy. Pages on the disk are in `pages`."""

    def __init__(self, folder: Path, serve: list[str], proxy: list[str]):
        self.pages = folder / "pages"
        make = lambda role, name: Process(name, folder, ["serve", *serve, "--kv-role", role])
        self.prefill = [make("kv_producer", f"prefill {i}") for i in (1, 2)]
        self.decode = [make("kv_consumer", f"decode {i}") for i in (1, 2)]
        url = lambda each: f"http://{LOOPBACK}:{each.port}"
        command = ["proxy", *proxy, "--prefill", *map(url, self.prefill), "--decode", *map(url, self.decode)]
        self.proxy = Process("proxy", folder, command)

    @property
    def engines(self) -> list[Process]:
        return [*self.prefill, *self.decode]

    async def start(self) -> None:
        for each in [*self.engines, self.proxy]:
            await each.start()

    def stop(self) -> None:
        for each in [self.proxy, *self.engines]:
            each.stop()

    def left_behind(self) -> list[str]:
        """What must not be there once all have ended."""
        found = [f"{path} was left unfinished" for path in self.pages.glob("*/.writing/*")]
        for each in [self.proxy, *self.engines]:
            names = sorted(os.listdir(each.folder))
            if len(names) > each.num_kills:  # a killed one can remove nothing
                found.append(f"{each.name} was killed {each.num_kills} times and left {', '.join(names)}")
            if "Traceback" in each.logs:
                found.append(f"{each.name} logged\n{each.logs[each.logs.index('Traceback') - 300 :][:2000]}")
        return found


@dataclass
class PairFaults:
    """Does them, each to an engine that is drawn among those that are up."""

    pairs: Pairs
    places: Places
    draw: random.Random
    done: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _down: set[str] = field(default_factory=set)
    _recovering: set[asyncio.Task] = field(default_factory=set)

    @property
    def kinds(self) -> dict[str, tuple[Callable[[], Awaitable[None]], set[str]]]:
        """By name: what does it and returns when it is over, and what clients may get meanwhile."""
        prefill, decode = self.pairs.prefill, self.pairs.decode
        return {
            "killed prefill": (lambda: self._killed(prefill), set()),
            "damaged pages": (self._damaged_pages, set()),
            "stopped decode": (lambda: self._stopped(decode), set()),
            "killed decode": (lambda: self._killed(decode), BROKEN),
            "stopped prefill": (lambda: self._stopped(prefill), set()),
            "lost pages": (self._lost_pages, set()),
            "killed core": (self._killed_core, BROKEN),
        }

    def excuse(self, status: str, begin: float, end: float) -> bool:
        """Whether a request of that time may have got this status."""
        return any(status in each.excuses and begin <= each.end and end >= each.begin for each in self.done)

    async def inject(self, name: str) -> None:
        """Begin it. It ends in the background."""
        act, excuses = self.kinds[name]
        fault = Fault(name, frozenset(excuses), time.monotonic())
        self.done.append(fault)

        async def to_the_end() -> None:
            await act()  # to its end: what is given up half way would leave processes that nobody knows
            fault.end = time.monotonic()
            if fault.seconds > RECOVERY_SECONDS:
                self.problems.append(f"{name}: it was over after {fault.seconds:.0f} s only")

        task = asyncio.ensure_future(to_the_end())
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)
        await asyncio.sleep(0)

    async def recovered(self) -> None:
        """Wait until all that was done is over."""
        await asyncio.gather(*self._recovering)

    @contextlib.asynccontextmanager
    async def _victim(self, engines: list[Process]):
        """One of these that is up; it counts as down meanwhile."""
        while not (up := [each for each in engines if each.name not in self._down]):
            await asyncio.sleep(0.1)
        victim = self.draw.choice(up)
        self._down.add(victim.name)
        try:
            yield victim
        finally:
            self._down.discard(victim.name)

    async def _killed(self, engines: list[Process]) -> None:
        async with self._victim(engines) as victim:
            pids = victim.pids()
            os.kill(pids[0], signal.SIGKILL)
            victim.num_kills += 1
            victim.ended()
            await self._dead(victim, pids[1:])
            await victim.start()
            await is_ready(victim)

    async def _dead(self, victim: Process, pids: list[int]) -> None:
        """What a killed server has started must end by itself."""
        end = time.monotonic() + DEATH_SECONDS
        while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            if time.monotonic() > end:
                self.problems.append(f"killed {victim.name}: {len(left)} of its processes live on")
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.05)

    async def _stopped(self, engines: list[Process]) -> None:
        async with self._victim(engines) as victim:
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(self.draw.uniform(*STOPPED_SECONDS))
            victim.signal(signal.SIGCONT)
            await is_ready(victim)

    async def _killed_core(self) -> None:
        async with self._victim(self.pairs.decode) as victim:
            before = victim.started.core_pid()
            os.kill(before, signal.SIGKILL)
            while victim.started.core_pid() in (before, None):
                await asyncio.sleep(0.05)
            victim.num_kills += 1
            await is_ready(victim)

    async def _damaged_pages(self) -> None:
        await asyncio.to_thread(self._damage_pages)

    def _damage_pages(self) -> None:
        files = sorted(self.pairs.pages.rglob("*.safetensors"))
        for path in self.draw.sample(files, min(len(files), MOST_DAMAGED)):
            with contextlib.suppress(OSError), open(path, "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if self.draw.random() < 0.3:
                    file.truncate(self.draw.randrange(size))
                else:
                    file.seek(self.draw.randrange(size))
                    file.write(self.draw.randbytes(8))

    async def _lost_pages(self) -> None:
        for space in self.pairs.pages.iterdir():
            if space.is_dir():
                await asyncio.to_thread(shutil.rmtree, space, ignore_errors=True)


async def is_ready(engine: Process) -> None:
    """Wait until it says so."""
    while True:
        with contextlib.suppress(Refused, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                await ask(engine.port, "/ready", b"")
                return
        await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
