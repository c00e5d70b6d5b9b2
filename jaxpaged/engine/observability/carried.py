"""What engine cores that are gone had counted: a counter that begins anew with its core would seem to fall."""

from collections.abc import Iterable
from dataclasses import replace

from jaxpaged.engine.observability.metrics_types import Counter, Histogram, Metric

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of a metric."""


class CarriedCounts:
    """Counters and histograms of all cores before the one that counts now. What else there is shrinks anyway."""

    def __init__(self) -> None:
        self._before: dict[Key, Counter | Histogram] = {}

    def keep(self, metrics: Iterable[Metric]) -> None:
        """A core is gone, of which these are the last metrics."""
        self._before = {key_of(each): each for each in self.added_to(metrics) if isinstance(each, Counter | Histogram)}

    def added_to(self, metrics: Iterable[Metric]) -> list[Metric]:
        """Those of the core that counts now with those before, also where it has not counted such a thing yet."""
        before = dict(self._before)
        now = [total(each, before.pop(key_of(each), None)) for each in metrics]
        return [*now, *before.values()]


def key_of(metric: Metric) -> Key:
    return metric.name, tuple(sorted(metric.labels.items()))


def total(now: Metric, before: Counter | Histogram | None) -> Metric:
    if isinstance(now, Counter) and isinstance(before, Counter):
        return replace(now, value=now.value + before.value)
    if isinstance(now, Histogram) and isinstance(before, Histogram):
        bounds = dict.fromkeys([*before.buckets, *now.buckets], 0)
        buckets = {bound: now.buckets.get(bound, 0) + before.buckets.get(bound, 0) for bound in bounds}
        return replace(now, count=now.count + before.count, sum=now.sum + before.sum, buckets=buckets)
    return now
