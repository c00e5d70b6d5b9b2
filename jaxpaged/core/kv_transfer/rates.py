"""Whether a beginning is sooner loaded or computed, judged by what both have taken so far. It knows no request."""

WEIGHT = 0.2
TRY_AGAIN = 16
"""After so many beginnings that were computed since loading is slower, one is loaded: times change."""


class Rates:
    """Moving averages of seconds per token, None before anything was measured."""

    def __init__(self) -> None:
        self.load_seconds: float | None = None
        self.prefill_seconds: float | None = None
        self._num_refused = 0
        self._last_result = 0.0

    def observe_load(self, num_tokens: int, seconds: float) -> None:
        self.load_seconds = averaged(self.load_seconds, seconds / num_tokens)

    def observe_step(self, num_tokens: int, num_sampled: int, begin: float, end: float) -> None:
        """A step that was dispatched and whose result was there at these times. Those that decode tell nothing."""
        begin, self._last_result = max(begin, self._last_result), end
        if num_tokens > 2 * num_sampled:
            self.prefill_seconds = averaged(self.prefill_seconds, (end - begin) / num_tokens)

    def pays(self) -> bool:
        """Whether to load what could be computed instead."""
        if self.load_seconds is None or self.prefill_seconds is None or self.load_seconds < self.prefill_seconds:
            return True
        self._num_refused += 1
        return self._num_refused % TRY_AGAIN == 0


def averaged(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
