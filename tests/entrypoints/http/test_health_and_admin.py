"""Probes, and the endpoints of the operator."""

import asyncio

import pytest

from jaxpaged import __version__
from jaxpaged.errors import CheckpointError

LONG = {"prompt": "the cat", "max_tokens": 60, "ignore_eos": True}


def test_a_serving_server_is_alive_and_ready(ask):
    assert ask("/version").json == {"version": __version__}
    for path in ("/health", "/ready", "/startup", "/ping"):
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
        paths = ("/health", "/ready", "/startup", "/ping", "/version")
        return [(await server.client.get(path)).status for path in paths]

    assert serving(scenario) == [503, 503, 503, 503, 200]


def test_an_engine_that_restarts_itself_is_alive_but_not_ready(serving):
    async def scenario(server):
        before = (await server.client.get("/ready")).status
        server.engine.is_restarting = True
        return before, [(await server.client.get(path)).status for path in ("/health", "/ready", "/startup", "/ping")]

    assert serving(scenario) == (200, [200, 503, 200, 200])


@pytest.mark.parametrize(
    ("options", "cold"),
    [({}, [503, 503]), ({"ready_when": "compiled"}, [503, 503]), ({"ready_when": "serving"}, [200, 200])],
)
def test_ready_means_compiled_unless_told_otherwise_and_started_means_to_have_been_ready(serving, options, cold):
    async def scenario(server):
        server.engine.cold = True
        answers = [await server.client.get(path) for path in ("/ready", "/startup")]
        server.engine.cold = False
        warm = [(await server.admin.get(path)).status for path in ("/ready", "/startup")]
        server.engine.cold = True
        return answers, warm, (await server.client.get("/startup")).status, (await server.client.get("/health")).status

    answers, warm, started, alive = serving(scenario, options=options)
    assert [answer.status for answer in answers] == cold and warm == [200, 200] and (started, alive) == (200, 200)
    if cold == [503, 503]:
        assert answers[0].error["message"] == "3 of the 7 programs that ordinary requests need are compiled."


def test_a_sleeping_engine_is_alive_but_not_ready(serving):
    async def scenario(server):
        asleep = await server.admin.post("/sleep?level=2")
        states = [await server.client.get(path) for path in ("/health", "/ready")]
        sleeping = (await server.admin.get("/is_sleeping")).json
        metrics = (await server.client.get("/metrics")).body.decode()
        awake = await server.admin.post("/wake_up?tags=weights&tags=kv_cache")
        return asleep.json, states, sleeping, metrics, awake.json, (await server.client.get("/ready")).status

    asleep, (health, ready), sleeping, metrics, awake, ready_again = serving(scenario)
    assert asleep == {"status": "sleeping", "level": 2} and sleeping == {"is_sleeping": True}
    assert (health.status, ready.status, ready_again) == (200, 503, 200)
    assert ready.error["message"] == "The engine sleeps at level 2. Requests wait until it is woken."
    assert 'vllm:engine_sleep_state{model_name="fake",engine="0",sleep_state="discard_all"} 1.0' in metrics
    assert awake == {"status": "awake", "tags": ["weights", "kv_cache"]}


def test_it_is_woken_in_parts_and_requests_that_came_meanwhile_are_answered(serving):
    async def scenario(server):
        await server.admin.post("/sleep")
        again = (await server.admin.post("/sleep?level=0")).json
        asking = asyncio.ensure_future(server.client.post("/v1/completions", LONG))
        await asyncio.sleep(0.02)
        parts = [(await server.admin.post(f"/wake_up?tags={tag}")).json for tag in ("weights", "kv_cache")]
        return again, parts, (await asking).json["choices"][0]["finish_reason"], (await server.admin.post("/wake_up"))

    again, parts, reason, awake = serving(scenario)
    assert again == {"status": "sleeping", "level": 1}, "what sleeps deeper goes on to do so"
    assert parts == [{"status": "sleeping", "tags": ["weights"]}, {"status": "awake", "tags": ["kv_cache"]}]
    assert reason == "length"
    assert awake.json == {"status": "awake", "tags": None}


def test_what_cannot_be_taken_back_is_said_without_paths_and_the_engine_sleeps_on(serving):
    async def scenario(server):
        await server.admin.post("/sleep")
        server.engine.executor.wake_error = CheckpointError("/srv/models/model.safetensors is gone. Download it.")
        refused = await server.admin.post("/wake_up")
        server.engine.executor.wake_error = None
        return refused, (await server.admin.post("/wake_up")).json["status"]

    refused, status = serving(scenario)
    assert (refused.status, refused.error["message"]) == (503, "<path> is gone. Download it.")
    assert status == "awake"


@pytest.mark.parametrize("query", ["sleep?level=3", "sleep?level=a", "sleep?mode=never", "wake_up?tags=bed"])
def test_a_wrong_way_to_sleep_or_wake_gives_400_with_its_name(serving, query):
    async def scenario(server):
        return await server.admin.post(f"/{query}")

    answer = serving(scenario)
    assert answer.status == 400 and answer.error["param"] in query.partition("?")[2].split("=")


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_ends_awaits_or_keeps_what_is_under_way(serving, mode):
    async def scenario(server):
        server.engine.go_on.clear()
        asking = asyncio.ensure_future(server.client.post("/v1/completions", LONG))
        await asyncio.sleep(0.02)
        sleeping = asyncio.ensure_future(server.admin.post(f"/sleep?mode={mode}"))
        await asyncio.sleep(0.02)
        server.engine.go_on.set()
        asleep = await sleeping
        await server.admin.post("/wake_up")
        return asleep.status, (await asking).json["choices"][0]["finish_reason"]

    assert serving(scenario) == (200, {"abort": "abort", "wait": "length", "keep": "length"}[mode])


def test_profiles_are_recorded_one_at_a_time(serving):
    async def scenario(server):
        paths = ("stop", "start", "start", "stop")
        refused = await server.admin.post("/start_profile?folder=/etc")
        assert refused.status == 400 and refused.error["param"] == "folder"
        answers = [await server.admin.post(f"/{path}_profile") for path in paths]
        return answers, server.engine.executor.recorded_to

    answers, folders = serving(scenario)
    assert [answer.status for answer in answers] == [409, 200, 409, 200]
    assert answers[0].error["type"] == "ConflictError"
    assert [answers[1].json, answers[3].json] == [{"profiling": True}, {"profiling": False}]
    assert folders == [None], "no folder comes over HTTP"


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


@pytest.mark.parametrize(
    "path", ["/sleep", "/wake_up", "/start_profile", "/stop_profile", "/reset_prefix_cache", "/abort_all_requests"]
)
def test_the_public_listener_has_none_of_the_operators_endpoints(ask, path):
    assert ask(path, {}).status == 404


def test_the_prefix_cache_is_forgotten_of_requests_that_run_too_where_the_operator_says_so(serving):
    """They are computed again. Before, the parameter passed without a word, and so did `reset_external`."""

    async def scenario(server):
        server.engine.executor.longest_run = 1
        asking = asyncio.ensure_future(server.client.post("/v1/completions", LONG | {"temperature": 0}))
        while len(server.engine.executor.executed) < 3:
            await asyncio.sleep(0)
        server.engine.go_on.clear()
        path = "/reset_prefix_cache"
        answers = [(await server.admin.post(f"{path}{query}")).json for query in ("", "?reset_running_requests=true")]
        refused = [await server.admin.post(f"{path}?{query}") for query in ("reset_external=true", "reset_external=a")]
        server.engine.go_on.set()
        interrupted = (await asking).json["choices"][0]["text"]
        whole = (await server.client.post("/v1/completions", LONG | {"temperature": 0})).json["choices"][0]["text"]
        return answers, [each.status for each in refused], interrupted == whole

    assert serving(scenario) == ([{"success": False}, {"success": True}], [400, 400], True)
