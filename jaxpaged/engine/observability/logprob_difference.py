"""How far the log probabilities of an engine and of its trainer are apart: a number that both can watch.

Weights that went wrong on their way, caches of old ones, and arithmetic that differs show in it, often nowhere else.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpaged.engine.observability.metrics_types import Gauge
from jaxpaged.errors import UsageError


class LogprobDifference(NamedTuple):
    """Of |difference| over `num_tokens` tokens: the mean, the value that one in a hundred exceeds, and the largest."""

    mean: float
    p99: float
    largest: float
    num_tokens: int

    def metrics(self) -> list[Gauge]:
        return [
            Gauge("jaxpaged:logprob_difference", {"of_tokens": name}, getattr(self, name))
            for name in ("mean", "p99", "largest")
        ]

    def __str__(self) -> str:
        by = f"{self.largest:.1e} from the engine's, {self.mean:.1e} in the mean of {self.num_tokens} tokens"
        return f"log p at most {by}"


Logprobs = np.ndarray | Sequence[float] | Sequence[np.ndarray] | Sequence[Sequence[float]]
"""Of tokens, or of texts of tokens."""


def logprob_difference(drawn: Logprobs, trained: Logprobs) -> LogprobDifference:
    """The difference of log probabilities of the same tokens, as an engine drew or scored them and as a trainer has
    them. NaN where one is NaN. Raises UsageError for other numbers of tokens, and for none."""
    apart = np.abs(flat(drawn, trained) - flat(trained, drawn))
    if not apart.size:
        raise UsageError("there are no log probabilities to compare. Give those of one token at least.")
    return LogprobDifference(float(apart.mean()), float(np.quantile(apart, 0.99)), float(apart.max()), apart.size)


def flat(logprobs: Logprobs, others: Logprobs) -> np.ndarray:
    """All of them as float64. Raises UsageError unless texts have as many tokens as those of `others`."""
    of_each, of_others = [np.size(each) for each in logprobs], [np.size(each) for each in others]
    if of_each != of_others:
        raise UsageError(
            f"{sum(of_each)} log probabilities in {len(of_each)} parts are compared with {sum(of_others)} in "
            f"{len(of_others)} parts. Give those of the same tokens."
        )
    return np.concatenate([np.zeros(0), *(np.ravel(np.asarray(each, np.float64)) for each in logprobs)])
