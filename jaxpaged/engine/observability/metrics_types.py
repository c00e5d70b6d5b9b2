"""What a metric is: a name, labels, and a value, a number at this moment, or a histogram. Plain records."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What every metric has."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: float


@dataclass(frozen=True)
class Gauge(Metric):
    """A number at this moment."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How many observations were at most each bound ("+Inf" last), their number and their sum."""

    count: int
    sum: float
    buckets: Mapping[str, int]
