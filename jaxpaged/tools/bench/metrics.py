"""Figures from outcomes, by vLLM's names and definitions. Pure functions: nothing is measured here.

TTFT is the time from sending to the first output. TPOT is the rest of the latency over all tokens but the first; a
request with one token has none, and counts as 0 for goodput. ITL are all times between chunks of all requests. E2EL is
the latency. Statistics are over requests that succeeded (for ITL over chunks); percentiles are interpolated linearly,
and the standard deviation is that of the whole population.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.tools.bench.requests import Outcome

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Name in results: short name, title."""
DEFAULT_METRICS = ("ttft", "tpot", "itl")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
)
"""Fields of a result with a value for every request."""


def serving_result(
    outcomes: Sequence[Outcome],
    duration: float,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput: Mapping[str, float] | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> dict[str, Any]:
    """What vLLM's benchmark reports of a run, details included.

    `goodput` has the longest allowed milliseconds of metrics. `count_tokens` is for servers that do not say how many
    tokens an answer has.
    """
    output_lens = [output_len(each, count_tokens) if each.success else 0 for each in outcomes]
    good = [(each, length) for each, length in zip(outcomes, output_lens, strict=True) if each.success]
    total_in, total_out = sum(each.prompt_len for each, _ in good), sum(output_lens)
    seconds = max(duration, 1e-9)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_in,
        "total_output_tokens": total_out,
        "request_throughput": len(good) / seconds,
        "request_goodput": num_good(good, goodput) / seconds if goodput else None,
        "output_throughput": total_out / seconds,
        "total_token_throughput": (total_in + total_out) / seconds,
        "max_output_tokens_per_s": most_tokens_in_a_second(good),
        "max_concurrent_requests": most_at_a_time([each for each, _ in good]),
        "rtfx": 0.0,  # of audio, which nobody asks for here
    }
    for name, values in samples(good).items():
        if name in metrics:
            result |= statistics_of(name, values, percentiles)
    return result | details(outcomes, output_lens)


def details(outcomes: Sequence[Outcome], output_lens: list[int]) -> dict[str, Any]:
    """What every request was like."""
    return {
        "input_lens": [each.prompt_len for each in outcomes],
        "output_lens": output_lens,
        "ttfts": [each.ttft for each in outcomes],
        "itls": [each.itl for each in outcomes],
        "latencies": [each.latency for each in outcomes],
        "start_times": [each.start_time for each in outcomes],
        "queue_times": [each.queue_time for each in outcomes],
        "generated_texts": [each.generated_text for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def output_len(outcome: Outcome, count_tokens: Callable[[str], int] | None) -> int:
    """Tokens of an answer: what the server counted, or else what its text becomes, or else 1."""
    if outcome.output_tokens:
        return outcome.output_tokens
    return count_tokens(outcome.generated_text) if count_tokens else 1


def tpot(outcome: Outcome, output_len: int) -> float | None:
    return (outcome.latency - outcome.ttft) / (output_len - 1) if output_len > 1 else None


def samples(good: Sequence[tuple[Outcome, int]]) -> dict[str, list[float]]:
    """The values, in seconds, of every metric."""
    per_token = [tpot(each, length) for each, length in good]
    return {
        "ttft": [each.ttft for each, _ in good],
        "tpot": [value for value in per_token if value is not None],
        "itl": [gap for each, _ in good for gap in each.itl],
        "e2el": [each.latency for each, _ in good],
        "client_queue_time": [each.queue_time for each, _ in good],
        "e2el_including_client_queue": [each.latency + each.queue_time for each, _ in good],
    }


def statistics_of(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds; 0 where there is no value."""
    milliseconds = 1e3 * np.asarray(values or [0.0])
    result = {
        f"mean_{name}_ms": float(milliseconds.mean()),
        f"median_{name}_ms": float(np.median(milliseconds)),
        f"std_{name}_ms": float(milliseconds.std()),
    }
    for percentile in percentiles:
        result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return result


def num_good(good: Sequence[tuple[Outcome, int]], limits: Mapping[str, float]) -> int:
    """How many requests kept all limits, which are in milliseconds."""
    count = 0
    for outcome, length in good:
        values = {"ttft": outcome.ttft, "tpot": tpot(outcome, length) or 0.0, "e2el": outcome.latency}
        count += all(1e3 * values[name] <= limit for name, limit in limits.items())
    return count


def most_tokens_in_a_second(good: Sequence[tuple[Outcome, int]]) -> float:
    """Of the seconds since the first request, the tokens of the one with the most.

    A chunk counts as one token, as in vLLM's benchmark, where it has one; where an answer's chunks have several, they
    are taken to have equally many.
    """
    if not good:
        return 0.0
    begin = min(each.start_time for each, _ in good)
    seconds: dict[int, float] = {}
    for outcome, length in good:
        time, weight = outcome.start_time - begin + outcome.ttft, length / outcome.num_chunks
        for gap in (0.0, *outcome.itl):
            time += gap
            seconds[int(time)] = seconds.get(int(time), 0.0) + weight
    return max(seconds.values())


def most_at_a_time(good: Sequence[Outcome]) -> int:
    """Most requests that were under way; one that ends makes room for one that begins at the same moment."""
    changes = [(each.start_time, 1) for each in good] + [(each.start_time + each.latency, -1) for each in good]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


# ---- what is asked for -----------------------------------------------------------------------------


def metrics_named(text: str) -> list[str]:
    """The metrics of `ttft,tpot`. Raises UsageError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METRICS:
            raise UsageError(f"--percentile-metrics names {name!r}; known are {', '.join(METRICS)}.")
    return names


def percentiles_of(text: str) -> list[float]:
    """The numbers of `25,50,99.9`. Raises UsageError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [math.nan]
    if not all(0 <= number <= 100 for number in found):
        raise UsageError(f"--metric-percentiles is {text!r}; it must be numbers from 0 to 100, such as 50,90,99.")
    return found


def limits_of(pairs: Sequence[str]) -> dict[str, float]:
    """The milliseconds of `ttft:500 tpot:50`. Raises UsageError."""
    limits = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if name not in GOODPUT_METRICS or not limit >= 0:
            known = ", ".join(GOODPUT_METRICS)
            raise UsageError(f"--goodput has {pair!r}; it takes a metric ({known}) and milliseconds, such as ttft:500.")
        limits[name] = limit
    return limits
