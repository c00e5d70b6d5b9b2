"""When requests are sent: times drawn ahead of the run, as vLLM's benchmark draws them.

Nothing here sends or waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.errors import UsageError


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
