"""Probes, and the endpoints of the operator."""

import asyncio

import pytest

from jaxpaged import __version__

LONG = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True}


def test_a_serving_server_is_alive_and_ready(ask):
    assert ask("/version").json == {"version": __version__}
    for path in ("/health", "/ready", "/ping"):
        answer = ask(path)
        assert (answer.status, answer.body) == (200, b"")
    assert ask("/load").json == {"server_load": 0}


def test_a_draining_server_is_alive_but_not_ready_and_takes_nothing(serving):
    async def scenario(server):
        server.service.traffic.draining = True
        paths = ["/health", "/ready"]
        statuses = [(await server.client.get(path)).status for path in paths]
        return statuses, await server.client.post("/v1/completions", LONG)

    statuses, refused = serving(scenario)
    assert statuses == [200, 503]
    assert refused.status == 503 and refused.error["type"] == "ServiceUnavailableError"


def test_a_dead_engine_is_neither_alive_nor_ready(serving):
    async def scenario(server):
        server.engine.is_dead = True
        return [(await server.client.get(path)).status for path in ("/health", "/ready", "/ping", "/version")]

    assert serving(scenario) == [503, 503, 503, 200]


def test_a_sleeping_engine_is_alive_but_not_ready(serving):
    async def scenario(server):
        asleep = await server.admin.post("/sleep?level=2")
        states = [(await server.client.get(path)).status for path in ("/health", "/ready")]
        sleeping = (await server.admin.get("/is_sleeping")).json
        awake = await server.admin.post("/wake_up?tags=weights&tags=kv_cache")
        return asleep.json, states, sleeping, awake.json, (await server.client.get("/ready")).status

    asleep, states, sleeping, awake, ready = serving(scenario)
    assert asleep == {"status": "sleeping", "level": 2} and sleeping == {"is_sleeping": True}
    assert states == [200, 503] and ready == 200
    assert awake == {"status": "awake", "tags": ["weights", "kv_cache"]}


@pytest.mark.parametrize("query", ["level=3", "level=a", "mode=never"])
def test_a_wrong_way_to_sleep_gives_400_with_its_name(serving, query):
    async def scenario(server):
        return await server.admin.post(f"/sleep?{query}")

    answer = serving(scenario)
    assert answer.status == 400 and answer.error["param"] == query.partition("=")[0]


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_sleep_ends_or_awaits_what_is_under_way(serving, mode):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", LONG))
        await asyncio.sleep(0.02)
        sleeping = asyncio.ensure_future(server.admin.post(f"/sleep?mode={mode}"))
        await asyncio.sleep(0.02)
        server.engine.go_on.set()
        asleep = await sleeping
        return asleep.status, (await asking).json["choices"][0]["finish_reason"]

    assert serving(scenario) == (200, {"abort": "abort", "wait": "length"}[mode])


def test_the_prefix_cache_is_forgotten(serving):
    async def scenario(server):
        for _ in range(2):
            await server.client.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 1})
        reset = (await server.admin.post("/reset_prefix_cache")).json
        answer = await server.client.post("/v1/completions", {"prompt": [7] * 20, "max_tokens": 1})
        return reset, answer.json["usage"]["prompt_tokens_details"]

    options = {"enable_prompt_tokens_details": True}
    assert serving(scenario, options=options) == ({"success": True}, {"cached_tokens": 0})


def test_requests_are_aborted_by_id_and_their_clients_told(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        body = {**LONG, "prompt": ["a", "b"]}
        asking = [
            asyncio.ensure_future(server.client.post("/v1/completions", body, x_request_id=name)) for name in "xy"
        ]
        await asyncio.sleep(0.02)
        aborted = (await server.client.post("/abort_requests", {"request_ids": ["cmpl-x", "cmpl-unknown"]})).json
        server.engine.go_on.set()
        first, second = await asyncio.gather(*asking)
        reasons = [{choice["finish_reason"] for choice in answer.json["choices"]} for answer in (first, second)]
        return aborted, reasons

    assert serving(scenario) == ({"num_aborted": 2}, [{"abort"}, {"length"}])


def test_clients_cannot_abort_everything_but_the_operator_can(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", LONG))
        await asyncio.sleep(0.02)
        refused = await server.client.post("/abort_requests", {})
        aborted = await server.admin.post("/abort_all_requests")
        server.engine.go_on.set()
        return refused.status, aborted.json, (await asking).json["choices"][0]["finish_reason"]

    assert serving(scenario) == (400, {"num_aborted": 1}, "abort")


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/reset_prefix_cache", "/abort_all_requests"])
def test_the_public_listener_has_none_of_the_operators_endpoints(ask, path):
    assert ask(path, {}).status == 404
