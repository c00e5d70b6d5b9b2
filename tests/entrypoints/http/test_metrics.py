"""The exposition format, read by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.engine.metrics import Counter, Gauge, Histogram
from jaxpaged.entrypoints.http.metrics import exposition

DASHBOARD = {
    "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:request_success",
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:cache_config_info",
}  # fmt: skip


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_metrics_are_what_prometheus_reads_with_the_labels_of_dashboards(serving):
    async def scenario(server):
        await server.client.post("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 5})
        return await server.client.get("/metrics")

    answer = serving(scenario)
    found = families(answer.body.decode())
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert set(found) >= DASHBOARD
    for name, family in found.items():
        for sample in family.samples if not name.startswith("http_") else ():
            assert sample.labels["model_name"] == "fake" and sample.labels["engine"] == "0"
    [tokens] = found["vllm:generation_tokens"].samples
    assert (tokens.name, tokens.value) == ("vllm:generation_tokens_total", 5)
    success = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success"].samples}
    assert success["length"] == 1
    [cache] = found["vllm:cache_config_info"].samples
    assert cache.labels["block_size"] == "4" and cache.value == 1


def test_histograms_have_buckets_sum_and_count():
    metric = Histogram("h", {}, 3, 1.5, {"1": 2, "+Inf": 3})
    samples = families("".join(exposition([metric], {})))["h"].samples
    assert {(s.name, s.labels.get("le")): s.value for s in samples} == {
        ("h_bucket", "1"): 2, ("h_bucket", "+Inf"): 3, ("h_sum", None): 1.5, ("h_count", None): 3,
    }  # fmt: skip


def test_samples_of_one_name_stand_together_and_labels_are_escaped():
    metrics = [Counter("c", {"x": 'a"\\\n'}, 1), Gauge("g", {}, 2), Counter("c", {"x": "b"}, 3)]
    text = "".join(exposition(metrics, {"model_name": "m"}))
    assert text.count("# TYPE c_total counter") == 1
    assert [s.labels["x"] for s in families(text)["c"].samples] == ['a"\\\n', "b"]
