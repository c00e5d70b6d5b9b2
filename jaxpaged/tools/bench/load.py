"""Sends requests when they are due, and collects what comes of them.

The loop is open: when a request is due does not depend on how earlier ones fare, unless `max_concurrency` holds it
back. Latencies count from the moment a request is really sent, as in vLLM's benchmark; the time between due and sent is
its `queue_time`. This module knows neither servers nor statistics.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from jaxpaged.tools.bench.requests import BenchRequest, Outcome

Send = Callable[[BenchRequest, int], Awaitable[Outcome]]
"""Asks a request, which has this number."""


@dataclass
class Run:
    """Everything that was measured. `send_lags` are seconds by which this process was late to send."""

    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    send_lags: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    interrupted: bool = False


async def run_load(
    send: Send,
    requests: Sequence[BenchRequest],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Ask every request when `arrivals` says. Cancelled, it returns what has ended by then."""
    run = Run()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(number: int, due: float) -> Outcome:
        async with places:
            outcome = await send(requests[number], number)
        outcome.queue_time = outcome.start_time - due
        on_end(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    with quiet_collector():
        begin, cpu = clock(), time.process_time()
        try:
            for number, after in enumerate(arrivals):
                if (wait := begin + after - clock()) > 0:
                    await asyncio.sleep(wait)
                run.send_lags.append(max(clock() - begin - after, 0.0))
                tasks.append(asyncio.create_task(one(number, begin + after)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            run.interrupted = True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()  # what has ended is reported
        finally:
            for task in tasks:
                task.cancel()  # those that have ended do not mind
            await asyncio.gather(*tasks, return_exceptions=True)
        run.duration, run.cpu_seconds = clock() - begin, time.process_time() - cpu
    run.outcomes = [task.result() for task in tasks if not task.cancelled()]
    return run


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """What exists already is not searched for garbage: with many prompts that takes tens of milliseconds a time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
