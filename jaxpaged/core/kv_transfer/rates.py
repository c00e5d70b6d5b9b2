"""Whether a beginning is sooner loaded or computed, judged by what both have taken so far. It knows no request."""

from collections.abc import Sequence

WEIGHT = 0.2
TRY_AGAIN = 16
"""After so many beginnings that were computed since loading is slower, one is loaded: times change."""

PAUSE = 0.1
"""Seconds after which a step does not belong to the ones before: who drew no token was aborted."""


class Rates:
    """Moving averages of seconds per token: of computing, None before anything was measured, and of loading, for each
    tier that anything was loaded from."""

    def __init__(self) -> None:
        self.load_seconds: dict[str, float] = {}
        self.prefill_seconds: float | None = None
        self._num_refused = 0
        self._num_pieces = 0  # tokens of steps whose end is not known, and since when they are computed
        self._begin = self._last_result = 0.0

    def observe_load(self, num_tokens: int, seconds: float, sources: Sequence[str]) -> None:
        """A load whose pages came from `sources`. Where these are several, what it took more or less than expected
        is everybody's, in the same ratio; a new one is expected to be as fast as the load was."""
        measured = seconds / num_tokens
        expected = {source: self.load_seconds.get(source, measured) for source in sources}
        ratio = measured / max(mean_of(expected, sources), 1e-12)
        for source, before in expected.items():
            self.load_seconds[source] = averaged(self.load_seconds.get(source), ratio * before)

    def observe_step(self, num_tokens: int, num_sampled: int, begin: float, end: float) -> None:
        """A step that was begun and whose result was there at these times. Those that decode tell nothing.

        A piece of a prompt behind which no token is drawn has no result to wait for, so it is over long before the
        device has computed it. It counts with the steps after it, up to one that draws.
        """
        if not self._num_pieces or begin > self._last_result + PAUSE:
            self._num_pieces, self._begin = 0, max(begin, self._last_result)
        self._num_pieces, self._last_result = self._num_pieces + num_tokens, end
        if not num_sampled:
            return
        if self._num_pieces > 2 * num_sampled:
            self.prefill_seconds = averaged(self.prefill_seconds, (end - self._begin) / self._num_pieces)
        self._num_pieces = 0

    def pays(self, sources: Sequence[str]) -> bool:
        """Whether to load what could be computed instead; `sources`: the tiers that its pages would come from."""
        if self.prefill_seconds is None or not self.load_seconds.keys() >= set(sources):
            return True
        if mean_of(self.load_seconds, sources) < self.prefill_seconds:
            return True
        self._num_refused += 1
        return self._num_refused % TRY_AGAIN == 0


def mean_of(seconds: dict[str, float], sources: Sequence[str]) -> float:
    """Of pages from these sources; all have as many tokens."""
    return sum(seconds[source] for source in sources) / max(len(sources), 1)


def averaged(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
