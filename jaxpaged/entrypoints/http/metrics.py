"""`GET /metrics`: the engine's metrics and the server's as Prometheus text, format 0.0.4.

Every sample of the engine has the labels `model_name` and `engine`, the number of its core, as vLLM's dashboards
expect. This module knows how metrics are written, not what they count.
"""

from collections.abc import Iterable, Iterator, Mapping

from starlette.requests import Request
from starlette.responses import Response

from jaxpaged.engine.observability.metrics import Counter, Gauge, Histogram, Metric
from jaxpaged.entrypoints.http.metric_help import HELP
from jaxpaged.entrypoints.http.transport.request_counts import Summary
from jaxpaged.serving.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = {Counter: "counter", Gauge: "gauge", Histogram: "histogram", Summary: "summary"}


class Metrics:
    """The endpoint."""

    def __init__(self, service: Service):
        self._service = service

    async def read(self, request: Request) -> Response:
        """All metrics."""
        service = self._service
        labels = {"model_name": service.model.names[0], "engine": "0"}
        of_engine = service.engine.get_metrics()
        metrics = [*of_engine, *self._of_server(of_engine)]
        own = [metric for read in service.sources for metric in read()]
        text = "".join([*exposition(metrics, labels), *exposition(own, {})])
        return Response(text, media_type=CONTENT_TYPE)

    def _of_server(self, of_engine: Iterable[Metric]) -> list[Metric]:
        """`vllm:cache_config_info` tells routers how many KV blocks there are, which each core says once it runs."""
        service, labels = self._service, self._service.model.cache_labels
        told = [
            Gauge("vllm:cache_config_info", {**metric.labels, **labels, "num_gpu_blocks": f"{metric.value:.0f}"}, 1)
            for metric in of_engine
            if isinstance(metric, Gauge) and metric.name == "jaxpaged:num_kv_blocks"
        ]
        return [
            *(told or [Gauge("vllm:cache_config_info", labels, 1)]),
            Gauge("jaxpaged:ready", {}, float(service.obstacle() is None)),
            Gauge("jaxpaged:http_requests_under_way", {}, len(service.traffic)),
        ]


def exposition(metrics: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[str]:
    """Lines of text; those of one name stand together under help and type. `labels` come before a metric's own."""
    by_name: dict[str, list[Metric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.name, []).append(metric)
    for name, group in by_name.items():
        if name in HELP:
            yield f"# HELP {exposed_name(group[0])} {HELP[name]}\n"
        yield f"# TYPE {exposed_name(group[0])} {KINDS[type(group[0])]}\n"
        for metric in group:
            yield from samples(metric, {**labels, **metric.labels})


def exposed_name(metric: Metric) -> str:
    """A counter is called `..._total`."""
    return f"{metric.name}_total" if isinstance(metric, Counter) else metric.name


def samples(metric: Metric, labels: Mapping[str, str]) -> Iterator[str]:
    match metric:
        case Histogram():
            for bound, count in metric.buckets.items():
                yield sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
            yield from totals(metric, labels)
        case Summary():
            yield from totals(metric, labels)
        case Counter() | Gauge():
            yield sample(exposed_name(metric), labels, metric.value)


def totals(metric: Histogram | Summary, labels: Mapping[str, str]) -> Iterator[str]:
    yield sample(f"{metric.name}_sum", labels, metric.sum)
    yield sample(f"{metric.name}_count", labels, metric.count)


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {float(value)!r}\n"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
