"""The exposition format, read by Prometheus' own parser."""

import asyncio
import json

from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.engine.observability.metrics import Counter, Gauge, Histogram
from jaxpaged.entrypoints.http.metric_help import HELP
from jaxpaged.entrypoints.http.metrics import exposition

DASHBOARD = {
    "vllm:e2e_request_latency_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_success",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:cache_config_info",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "jaxpaged:engine_restarts",
}


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


def test_counts_are_those_of_the_answers(serving):
    """Whole answers and streams, several sequences, an abort, a step that fails, and runs of decode steps."""
    asked = {"prompt": [7, 8, 9], "max_tokens": 20, "ignore_eos": True}

    async def scenario(server):
        ask = server.client.post
        usages = [
            (await ask("/v1/completions", {**asked, "n": n, "stop": stop})).json["usage"]
            for n, stop in ((1, None), (3, None), (2, "k"))
        ]
        streamed = await ask("/v1/completions", {**asked, "stream": True, "stream_options": {"include_usage": True}})
        usages.append(json.loads(streamed.body.decode().split("data: ")[-2])["usage"])
        server.engine.executor.fail_at = {len(server.engine.executor.executed) + 1: "result"}
        failed = await ask("/v1/completions", asked)
        server.engine.executor.fail_at = {}
        server.engine.go_on.clear()
        task = asyncio.ensure_future(ask("/v1/completions", asked, x_request_id="x"))
        await asyncio.sleep(0.02)
        await ask("/abort_requests", {"request_ids": ["cmpl-x"]})
        server.engine.go_on.set()
        usages.append((await task).json["usage"])
        return usages, failed.status, (await server.client.get("/metrics")).body.decode()

    usages, failed, text = serving(scenario, num_scheduler_steps=8)
    values = {(s.name, s.labels.get("finished_reason")): s.value for f in families(text).values() for s in f.samples}
    generated = sum(usage["completion_tokens"] for usage in usages)
    assert failed == 500 and usages[3]["completion_tokens"] == 20 and usages[4]["completion_tokens"] == 0
    # The failed request's first token came before the step that failed, and nobody was told.
    assert values["vllm:generation_tokens_total", None] == generated + 1
    num_begun = 1 + 3 + 2 + 1 + 1
    assert values["vllm:inter_token_latency_seconds_count", None] == generated + 1 - num_begun
    assert values["vllm:time_to_first_token_seconds_count", None] == num_begun
    assert values["vllm:iteration_tokens_total_sum", None] == generated + 1 + 3 * num_begun
    ends = {reason: values["vllm:request_success_total", reason] for reason in ("stop", "length", "abort", "error")}
    assert sum(ends.values()) == 9 and (ends["abort"], ends["error"]) == (1, 1)
    assert values["vllm:request_max_num_generation_tokens_count", None] == 6


def test_every_metric_says_what_it_is_and_in_which_unit(serving):
    async def scenario(server):
        await server.client.post("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 5})
        return await server.client.get("/metrics")

    found = families(serving(scenario).body.decode())
    for name, family in found.items():
        assert family.documentation.endswith("."), f"{name} has no help in metric_help.py"
        assert family.type != "unknown"
    for name, text in HELP.items():
        assert name.endswith("_seconds") == text.startswith(("From", "The mean", "The same", "Seconds")), name
        assert name.endswith("_bytes") == text.startswith("Bytes"), name


def test_routers_are_told_how_many_blocks_there_are(serving):
    async def scenario(server):
        before = families((await server.client.get("/metrics")).body.decode())
        server.engine.executor.stats = lambda: {"num_kv_blocks": 64}
        return before, families((await server.client.get("/metrics")).body.decode())

    before, after = (each["vllm:cache_config_info"].samples[0].labels for each in serving(scenario))
    assert (before["num_gpu_blocks"], after["num_gpu_blocks"]) == ("None", "64")


def test_readiness_is_a_metric_too(serving):
    async def scenario(server):
        values = []
        for server.engine.cold in (True, False):
            found = families((await server.client.get("/metrics")).body.decode())
            values.append((found["jaxpaged:ready"].samples[0].value, (await server.client.get("/ready")).status))
        return values

    assert serving(scenario) == [(0, 503), (1, 200)]


def test_histograms_have_buckets_sum_and_count():
    metric = Histogram("h", {}, 3, 1.5, {"1": 2, "+Inf": 3})
    samples = families("".join(exposition([metric], {})))["h"].samples
    assert {(s.name, s.labels.get("le")): s.value for s in samples} == {
        ("h_bucket", "1"): 2,
        ("h_bucket", "+Inf"): 3,
        ("h_sum", None): 1.5,
        ("h_count", None): 3,
    }


def test_samples_of_one_name_stand_together_and_labels_are_escaped():
    metrics = [Counter("c", {"x": 'a"\\\n'}, 1), Gauge("g", {}, 2), Counter("c", {"x": "b"}, 3)]
    text = "".join(exposition(metrics, {"model_name": "m"}))
    assert text.count("# TYPE c_total counter") == 1
    assert [s.labels["x"] for s in families(text)["c"].samples] == ['a"\\\n', "b"]
