"""Draws when requests are due, as vLLM's benchmark does, sends them then, and collects what comes of them.

The loop is open: when a request is due does not depend on how earlier ones fare, unless `max_concurrency` holds it
back. Latencies count from the moment a request is really sent, as in vLLM's benchmark; the time between due and sent is
its `queue_time`. This module knows neither servers nor statistics.
"""

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.errors import UsageError
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
    # What exists already is not searched for garbage: with many prompts that takes tens of milliseconds a time.
    gc.collect()
    gc.freeze()
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


# ---- when requests are due -------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """How requests arrive. `burstiness` is the shape of the gamma distribution of the gaps between them: 1 is a Poisson
    process, below 1 is burstier, above 1 more even, infinity is a fixed gap. `strategy` ramps the rate up from
    `start_rps` to `end_rps`, in requests a second, in place of `request_rate`."""

    request_rate: float = math.inf
    burstiness: float = 1.0
    strategy: str | None = None
    start_rps: float | None = None
    end_rps: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate is {self.request_rate:g}; it must be above 0, or inf.")
        if not self.burstiness > 0:
            raise UsageError(f"--burstiness is {self.burstiness:g}; it must be above 0.")
        if self.strategy is None:
            if self.start_rps is not None or self.end_rps is not None:
                raise UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
            return
        if self.request_rate != math.inf:
            raise UsageError(
                "--request-rate and --ramp-up-strategy are given. Leave one out: a ramp has its own rates."
            )
        if self.start_rps is None or self.end_rps is None:
            raise UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
        if not 0 < self.start_rps <= self.end_rps < math.inf:
            raise UsageError(
                f"the ramp goes from {self.start_rps:g} to {self.end_rps:g} requests a second; it must begin above 0 "
                "and not go down."
            )

    def rates(self, num_requests: int) -> np.ndarray:
        """The rate at every request, in requests a second."""
        if self.strategy is None:
            return np.full(num_requests, self.request_rate)
        progress = np.arange(num_requests) / max(num_requests - 1, 1)
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress

    def arrivals(self, num_requests: int, seed: int) -> list[float]:
        """Seconds after the beginning at which every request is due.

        At a fixed rate the times are stretched so that the last request is due at `num_requests / request_rate`:
        otherwise chance would change the rate of a short run by some per cent.
        """
        rates = self.rates(num_requests)
        if np.isinf(rates).any():
            return [0.0] * num_requests
        if math.isinf(self.burstiness):
            gaps = 1 / rates
        else:
            gaps = np.random.default_rng(seed).gamma(self.burstiness, 1 / (rates * self.burstiness))
        times = np.cumsum(gaps)
        if self.strategy is None and times[-1] > 0:
            times *= num_requests / self.request_rate / times[-1]
        return times.tolist()


def rate_changes(rates: Sequence[float], arrivals: Sequence[float]) -> list[tuple[int, float]]:
    """(whole requests a second, seconds after the beginning) of every whole rate that a ramp reaches."""
    reached, changes = int(rates[0]), [(int(rates[0]), 0.0)]
    for rate, due in zip(rates, arrivals, strict=True):
        changes += [(step, due) for step in range(reached + 1, int(rate) + 1)]
        reached = max(reached, int(rate))
    return changes
