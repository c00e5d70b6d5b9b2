"""`EngineStats`: what an engine did since it started, in a few lines for people.

All of it comes from the engine's metrics and the executor's counters; `LLM.get_metrics` has them one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpaged.engine.observability.metrics import Histogram, Metric
from jaxpaged.tools.pictures.tables import Line, html_table, text_table


class EngineStats:
    """Lines of (name, value). `values` has the numbers behind them by the names of metrics and counters."""

    def __init__(self, metrics: Sequence[Metric], executor: Mapping[str, Any]):
        self.values: dict[str, Any] = dict(executor)
        self.finished: dict[str, int] = {}
        for metric in metrics:
            name = metric.name.removeprefix("vllm:")
            if name == "request_success" and metric.value:
                self.finished[metric.labels["finished_reason"]] = metric.value
            elif not metric.labels and not name.startswith("jaxpaged:"):
                self.values[name] = metric

    def number(self, name: str) -> float:
        return getattr(self.values[name], "value", 0)

    @property
    def lines(self) -> list[Line]:
        ended = ", ".join(f"{count} by {reason}" for reason, count in self.finished.items()) or "none"
        queries, hits = self.number("prefix_cache_queries"), self.number("prefix_cache_hits")
        lines = [
            (
                "requests",
                f"{self.number('num_requests_running'):.0f} running, "
                f"{self.number('num_requests_waiting'):.0f} waiting; ended: {ended}",
            ),
            ("tokens", f"{self.number('prompt_tokens')} of prompts, {self.number('generation_tokens')} generated"),
            ("first token", mean_seconds(self.values["time_to_first_token_seconds"])),
            ("next tokens", mean_seconds(self.values["inter_token_latency_seconds"])),
            (
                "KV cache",
                f"{self.number('kv_cache_usage_perc'):.0%} in use, {self.number('num_preemptions')} preemptions",
            ),
            ("prefix cache", f"{hits} of {queries} tokens found ({hits / max(queries, 1):.0%})"),
        ]
        return lines + self._executor_lines()

    def _executor_lines(self) -> list[Line]:
        """What an executor with programs and padding has to tell; others tell their steps only."""
        values = self.values
        if "bucket_steps" not in values:
            return [("steps", str(values.get("steps", 0)))]
        padding = values["padded_tokens"] / max(values["padded_tokens"] + values["scheduled_tokens"], 1)
        buckets = ", ".join(f"{count} of {size}" for size, count in values["bucket_steps"].items()) or "none"
        programs = f"{values['programs_ready']} of {values['programs']} ready, {values['recompiles']} recompiles"
        return [
            ("steps", f"{values['steps']}; padded to: {buckets}; {padding:.0%} of the tokens were padding"),
            ("programs", programs),
        ]

    def __repr__(self) -> str:
        return text_table(self.lines)

    def _repr_html_(self) -> str:
        return html_table(self.lines)


def mean_seconds(histogram: Histogram) -> str:
    if not histogram.count:
        return "none yet"
    return f"{histogram.sum / histogram.count * 1e3:.1f} ms on average, {histogram.count} of them"
