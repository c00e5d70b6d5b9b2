"""Counts of requests under the names and labels of vLLM's dashboards, whatever clients ask for."""

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

COMPLETION = {"prompt": "the cat", "max_tokens": 3}
HANDLER = {"handler": "/v1/completions"}


def samples(answer):
    """(name, labels) -> value of what begins with http_."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
        if sample.name.startswith("http_")
    }


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def counted(serving, *asked, is_reading=None, **settings):
    """What is counted after these (method, path, body)."""

    async def scenario(server):
        server.client.is_reading = is_reading
        answers = []
        for method, path, body in asked:
            data = b"" if body is None else json.dumps(body).encode()
            answers.append(await server.client.ask(method, path, data, {"content_type": "application/json"}))
        key = {"x_api_key": settings["keys"][0]} if "keys" in settings else {}
        return answers, samples(await server.client.get("/metrics", **key))

    return serving(scenario, **settings)


def test_requests_are_counted_with_their_times_and_sizes(serving):
    asked = ("POST", "/v1/completions", COMPLETION)
    answers, found = counted(serving, asked, asked, ("POST", "/v1/completions", {"prompt": 5}))
    requests = {"method": "POST", **HANDLER}
    assert value(found, "http_requests_total", status="2xx", **requests) == 2
    assert value(found, "http_requests_total", status="4xx", **requests) == 1
    assert value(found, "http_request_duration_seconds_count", **requests) == 3
    assert value(found, "http_request_duration_seconds_bucket", le="+Inf", **requests) == 3
    assert value(found, "http_request_duration_highr_seconds_count") == 3
    assert 0 < value(found, "http_request_duration_highr_seconds_sum") < 20
    sent = 2 * len(json.dumps(COMPLETION)) + len(json.dumps({"prompt": 5}))
    assert value(found, "http_request_size_bytes_sum", **HANDLER) == sent
    assert value(found, "http_response_size_bytes_sum", **HANDLER) == sum(len(answer.body) for answer in answers)
    assert value(found, "http_response_size_bytes_count", **HANDLER) == 3


@pytest.mark.parametrize("is_reading", [None, lambda: True])
def test_all_pieces_of_a_stream_count(serving, is_reading):
    asked = ("POST", "/v1/completions", {**COMPLETION, "stream": True})
    [answer], found = counted(serving, asked, is_reading=is_reading)
    assert value(found, "http_response_size_bytes_sum", **HANDLER) == len(answer.body) > 500


def test_labels_are_declared_paths_and_known_methods_only(serving):
    strange = [("GET", f"/v1/responses/resp_{i}", None) for i in range(5)]
    strange += [("GET", f"/nowhere/{i}", None) for i in range(5)]
    strange += [(f"METHOD{i}", "/v1/completions", None) for i in range(5)]
    _, found = counted(serving, *strange)
    counts = {
        dict(labels)["handler"]: (dict(labels)["method"], n)
        for (name, labels), n in found.items()
        if name == "http_requests_total"
    }
    assert counts == {"/v1/responses/{id}": ("GET", 5), "none": ("GET", 5), "/v1/completions": ("other", 5)}


def test_a_wrong_key_leads_nowhere(serving):
    _, found = counted(serving, ("POST", "/v1/completions", COMPLETION), keys=("sesame",))
    assert value(found, "http_requests_total", method="POST", status="4xx", handler="none") == 1


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/load", "/version", "/metrics"])
def test_probes_are_not_counted(serving, path):
    _, found = counted(serving, ("GET", path, None))
    assert not any(name == "http_requests_total" for name, _ in found)


def test_a_client_that_leaves_counts_as_its_own_fault(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        await server.client.post("/v1/completions", {**COMPLETION, "stream": True}, leave_after=0)
        server.engine.go_on.set()
        await asyncio.sleep(0)
        return samples(await server.client.get("/metrics"))

    assert value(serving(scenario), "http_requests_total", method="POST", status="4xx", **HANDLER) == 1


def test_the_operators_requests_count_too(serving):
    async def scenario(server):
        await server.admin.post("/reset_prefix_cache")
        return samples(await server.client.get("/metrics"))

    assert value(serving(scenario), "http_requests_total", method="POST", status="2xx", handler="/reset_prefix_cache")
