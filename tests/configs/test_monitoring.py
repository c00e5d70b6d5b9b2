"""The dashboard and the alert rules; `end_to_end/test_serve.py` asks whether a real server has what they ask for."""

import itertools
import re

import promql_parser
import pytest

from jaxpaged.engine.observability.metrics import Histogram
from jaxpaged.entrypoints.http.metric_help import HELP
from jaxpaged.entrypoints.http.metrics import exposition
from jaxpaged.entrypoints.http.transport.request_counts import Exchange, RequestCounts
from tests.configs.queries import OF_FAILURES, missing_of, needs, panels, problems, queries, rules, unknown_values

DRAFT_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
NOT_SHOWN = {
    "vllm:cache_config_info": "routers read it",
    "vllm:request_inference_time_seconds": "it is prefill and decode together",
    **{f"vllm:spec_decode_num_{what}": "only where tokens are drafted" for what in DRAFT_COUNTERS},
    **{
        f"jaxpaged:kv_offload_{what}": "bytes say as much"
        for what in ("pages_saved", "pages_loaded", "tier_pages", "tier_hits", "tier_misses", "tier_stored")
    },
    "jaxpaged:kv_offload_copies_under_way": "it is 0 but for moments; tests ask for it",
    **{f"vllm:kv_offload_{what}_size": "it depends on the lengths of prompts only" for what in ("load", "store")},
    **{
        f"jaxpaged:kv_{what}": "only where prompts are lent"
        for what in (
            "leases",
            "lease_bytes",
            "leases_granted",
            "leases_released",
            "leases_expired",
            "lent_pages",
            "lent_bytes",
            "lent_refused",
            "borrowed_pages",
            "borrowed_bytes",
        )
    },
    "vllm:lora_requests_info": "routers read it",
    "jaxpaged:weight_version_info": "only where a trainer sends weights",
    "jaxpaged:logprob_difference": "only where a trainer tells of it",
    "jaxpaged:weight_updates": "only where a trainer sends weights",
    **{
        f"jaxpaged:lora_{what}": "only where requests name adapters"
        for what in ("loads", "evictions", "host_hits", "host_misses", "host_evictions")
    },
    "jaxpaged:programs_from_bundle": "it does not change",
    "jaxpaged:programs_from_cache": "it tells of the start only",
    "jaxpaged:num_devices": "it does not change",
    "jaxpaged:weight_bytes": "it does not change",
    "jaxpaged:state_bytes": "it does not change",
    "jaxpaged:kv_cache_bytes": "it does not change",
}
SUFFIXES = re.compile(r"_(total|bucket|sum|count)$")


def test_every_query_is_one():
    for where, query in queries():
        promql_parser.parse(query)
        assert list(needs(query)), f"{where} asks for nothing"


def test_every_metric_of_the_server_is_on_the_dashboard():
    asked = {name for where, query in queries() if where.startswith("panel") for name, _ in needs(query)}
    shown = asked | {SUFFIXES.sub("", name) for name in asked}
    assert set(HELP) - shown == set(NOT_SHOWN)


def test_panels_lie_beside_one_another_and_say_what_they_show():
    boxes = {}
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24
        for cell in itertools.product(range(place["w"]), range(place["h"])):
            where = place["x"] + cell[0], place["y"] + cell[1]
            assert where not in boxes, f"{panel['title']} lies on {boxes[where]}"
            boxes[where] = panel["title"]
        if panel["type"] != "row":
            assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"].get("unit", "heatmap")
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


def test_a_curve_by_a_label_has_that_label_in_its_name():
    """Else curves of several servers could not be told apart."""
    for panel in panels():
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                kept = re.search(r"by \(([^)]*)\)", target["expr"])
                assert kept is None or label in kept[1].split(", "), target


def test_rules_say_what_happened_and_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_bounds_of_latencies_are_between_buckets_that_exist():
    """A quantile is never above the last bucket but one, so a bound beyond it would never be exceeded."""
    for rule in rules():
        if "histogram_quantile" in rule["expr"]:
            bound = float(rule["expr"].split(">")[-1])
            assert 0 < bound <= 80


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("sum(rate(h_bucket[5m]))", None),
        ('histogram_quantile(0.9, sum by (le, instance) (rate(h_bucket{job="x"}[5m])))', None),
        ("sum(rate(h[5m]))", "asks for h, which is not there"),
        ("rate(h_sum[5m]) / (1 + rate(h_cuont[5m]))", "asks for h_cuont, which is not there"),
        ('h_bucket{model="m"}', "asks for model of h_bucket, which it has not"),
        ("sum by (handler) (rate(h_count[5m])) > 1 and up == 1", "asks for handler of h_count, which it has not"),
    ],
)
def test_what_is_missing_is_found(query, problem):
    text = "".join(exposition([Histogram("h", {"a": "b"}, 1, 1.0, {"+Inf": 1})], {}))
    there = {"h_bucket": {"a", "le", "job", "instance"}, "h_sum": {"a", "job"}, "h_count": {"a", "job"}, "up": {"job"}}
    assert list(missing_of("it", query, there)) == ([] if problem is None else [f"it {problem}"])
    assert len(problems(text)) > 80, "that text has nothing that the dashboard asks for"


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ('rate(h_count{reason="stop"}[5m])', []),
        ('rate(h_count{job="anything",reason!="stop",status="5xx"}[5m])', []),
        ('h_count{reason=~".*"}', []),
        ('sum(h_count{reason=~"stop|lenght"}) / 2', ["lenght"]),
        ('h_count{status="500"}', ["500"]),
    ],
)
def test_a_value_that_no_label_has_is_found(query, unknown):
    found = unknown_values("it", query, {("h_count", "reason", "stop")})
    assert [text.split("'")[1] for text in found] == unknown


def test_values_that_come_with_failures_are_those_that_the_server_gives():
    grpc = pytest.importorskip("grpc", reason="comes with the extra test")
    counts = RequestCounts()
    counts.add(Exchange("GET", "/", 503, 0, 0), 0.1)
    assert OF_FAILURES["status"] == {metric.labels["status"] for metric in counts.read() if "status" in metric.labels}
    assert OF_FAILURES["grpc_code"] <= {code.name for code in grpc.StatusCode}
