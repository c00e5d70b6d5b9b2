"""Responses that are kept: retrieved, followed, cancelled, deleted, and gone on from; and whose they are."""

import asyncio

import pytest

from tests.entrypoints.http.responses.answering import HERMES, PARSERS, WEATHER, events_of, with_room

BODY = {"input": "the cat", "temperature": 0, "max_output_tokens": 6}
BACKGROUND = {**BODY, "background": True}


async def create(server, **body):
    answer = await server.client.post("/v1/responses", {**BODY, **body})
    assert answer.status == 200, answer.body
    return answer.json


async def until(server, response_id, *statuses):
    """Asks until the response has one of the statuses."""
    while (answer := await server.client.get(f"/v1/responses/{response_id}")).json["status"] not in statuses:
        await asyncio.sleep(0.005)
    return answer.json


async def cancel(server, response_id):
    return (await server.client.post(f"/v1/responses/{response_id}/cancel", b"")).json


async def delete(server, response_id):
    return await server.client.ask("DELETE", f"/v1/responses/{response_id}", b"", {})


def test_what_was_answered_can_be_retrieved(serving):
    async def scenario(server):
        made = await create(server)
        assert (await server.client.get(f"/v1/responses/{made['id']}")).json == made
        streamed = events_of(await server.client.post("/v1/responses", {**BODY, "stream": True}))[-1]["response"]
        assert (await server.client.get(f"/v1/responses/{streamed['id']}")).json == streamed

    serving(scenario)


def test_what_is_not_to_be_stored_is_not_kept(serving):
    async def scenario(server):
        made = await create(server, store=False)
        return made, await server.client.get(f"/v1/responses/{made['id']}")

    made, answer = serving(scenario)
    assert made["store"] is False and answer.status == 404 and answer.error["param"] == "response_id"


def test_a_response_in_the_background_is_made_while_nobody_waits(serving):
    async def scenario(server):
        queued = await create(server, background=True)
        ended = await until(server, queued["id"], "incomplete")
        foreground = await create(server)
        return queued, ended, foreground

    queued, ended, foreground = serving(scenario)
    assert queued["status"] == "queued" and queued["background"] is True and queued["output"] == []
    assert ended["output"][0]["content"] == foreground["output"][0]["content"]
    assert ended["usage"] == foreground["usage"]


def test_events_in_the_background_can_be_read_again_from_any_place(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        first = events_of(await server.client.post("/v1/responses", {**BACKGROUND, "stream": True}))
        place = f"/v1/responses/{first[0]['response']['id']}?stream=true"
        again = events_of(await server.client.get(place))
        after = events_of(await server.client.get(f"{place}&starting_after=4"))
        at_end = await server.client.get(f"{place}&starting_after={len(first) - 1}")
        beyond = await server.client.get(f"{place}&starting_after=1000")
        return first, again, after, at_end, beyond

    first, again, after, at_end, beyond = serving(scenario)
    assert [event["type"] for event in first[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [first[i]["response"]["status"] for i in range(3)] == ["queued", "queued", "in_progress"]
    assert again == first and after == first[5:] and first[-1]["type"] == "response.incomplete"
    assert events_of(at_end) == events_of(beyond) == [] and at_end.status == 200


def test_who_stops_to_follow_does_not_end_a_response_in_the_background(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        body = {**BACKGROUND, "stream": True, "max_output_tokens": 20}
        left = events_of(await server.client.post("/v1/responses", body, leave_after=1))
        ended = await until(server, left[0]["response"]["id"], "incomplete")
        return ended, server.engine.aborted

    ended, aborted = serving(scenario)
    assert ended["usage"]["output_tokens"] == 20 and aborted == []


def test_a_response_that_has_ended_is_not_under_way_any_more(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        queued = await create(server, background=True)
        while (status := (await server.client.get(f"/v1/responses/{queued['id']}")).json["status"]) != "incomplete":
            assert status in ("queued", "in_progress")
            await asyncio.sleep(0)
        return len(server.service.traffic)

    assert serving(scenario) == 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_response_is_cancelled_with_what_it_had(serving, steps):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        queued = await create(server, background=True, max_output_tokens=40)
        if steps:
            await until(server, queued["id"], "in_progress")
        for _ in range(steps):
            await asyncio.sleep(0)
        cancelled = await cancel(server, queued["id"])
        again = await cancel(server, queued["id"])
        return cancelled, again, await server.client.get(f"/v1/responses/{queued['id']}")

    cancelled, again, kept = serving(scenario)
    assert cancelled["status"] == "cancelled" and cancelled == again == kept.json
    assert all(item["status"] == "incomplete" for item in cancelled["output"])
    assert bool(cancelled["output"]) == (steps > 0)


def test_followers_of_a_cancelled_response_see_its_end(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        queued = await create(server, background=True)
        body = {**BACKGROUND, "stream": True}
        following = asyncio.ensure_future(server.client.post("/v1/responses", body))
        while len(server.service.traffic) < 2:
            await asyncio.sleep(0.005)
        for engine_id in server.service.traffic.engine_ids():
            response_id = engine_id.partition("-")[0]
            await cancel(server, response_id)
        server.engine.go_on.set()
        return queued, await following

    queued, followed = serving(scenario)
    events = events_of(followed)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["status"] == "cancelled"
    assert events[-1]["response"]["id"] != queued["id"]


def test_what_has_ended_stays_as_it_is_when_it_is_cancelled(serving):
    async def scenario(server):
        queued = await create(server, background=True)
        ended = await until(server, queued["id"], "incomplete")
        return ended, await cancel(server, queued["id"])

    ended, cancelled = serving(scenario)
    assert cancelled == ended


def test_a_response_that_was_aborted_by_its_id_is_cancelled(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        queued = await create(server, background=True, max_output_tokens=40)
        await until(server, queued["id"], "in_progress")
        await server.client.post("/abort_requests", {"request_ids": [queued["id"]]})
        return await until(server, queued["id"], "cancelled")

    assert serving(scenario)["output"][0]["status"] == "incomplete"


def test_a_deleted_response_is_gone_and_its_work_ends(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        queued = await create(server, background=True)
        deleted = await delete(server, queued["id"])
        return queued, deleted, await server.client.get(f"/v1/responses/{queued['id']}"), len(server.service.traffic)

    queued, deleted, answer, under_way = serving(scenario)
    assert deleted.json == {"id": queued["id"], "object": "response", "deleted": True}
    assert answer.status == 404 and under_way == 0


def test_a_failure_in_the_background_is_kept(serving):
    async def scenario(server):
        server.engine.executor.fail_at[0] = "result"
        queued = await create(server, background=True)
        failed = await until(server, queued["id"], "failed")
        follow = await server.client.post("/v1/responses", {"input": "a", "previous_response_id": queued["id"]})
        return failed, follow

    failed, follow = serving(scenario)
    assert failed["error"]["code"] == "server_error" and failed["usage"] is None
    assert follow.status == 400 and follow.error["param"] == "previous_response_id"


def test_what_is_wrong_with_a_request_is_told_before_it_goes_to_the_background(serving):
    async def scenario(server):
        long = await server.client.post("/v1/responses", {**BACKGROUND, "input": "x" * 200})
        wrong = await server.client.post("/v1/responses", {**BACKGROUND, "logit_bias": {"5000": 1}})
        return long, wrong

    long, wrong = serving(scenario)
    assert (long.status, long.error["param"]) == (400, "input")
    assert (wrong.status, wrong.error["param"]) == (400, "logit_bias")


def test_a_full_queue_refuses_responses_for_the_background_at_once(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        queued = [await create(server, background=True) for _ in range(8)]
        refused = await server.client.post("/v1/responses", BACKGROUND)
        for each in queued:
            await cancel(server, each["id"])
        return refused

    refused = serving(scenario, options={"max_num_queued_reqs": 0})
    assert refused.status == 429 and refused.headers["retry-after"] == "1"


def test_a_store_full_of_running_responses_takes_no_more(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        queued = [await create(server, background=True) for _ in range(2)]
        refused = await server.client.post("/v1/responses", BACKGROUND)
        for each in queued:
            await cancel(server, each["id"])
        return refused

    assert serving(scenario, options={"max_stored_responses": 2}).status == 429


# ---- conversations


def prompts_of(server):
    return [seen[0]["prompt"] for seen in server.engine.seen]


def test_a_response_goes_on_from_another_one_without_its_instructions(serving):
    async def scenario(server):
        first = await create(server, instructions="be kind")
        await create(server, input="and then", previous_response_id=first["id"], instructions="be brief")
        return prompts_of(server)

    _, prompt = serving(scenario, **with_room("the sun"))
    assert prompt == (
        "<bos><turn>system\nbe brief<end>\n<turn>user\nthe cat<end>\n<turn>assistant\nthe sun<end>\n"
        "<turn>user\nand then<end>\n<turn>assistant\n"
    )


def test_a_chain_of_responses_has_the_whole_conversation(serving):
    async def scenario(server):
        previous = None
        for word in ("a", "b", "c"):
            made = await create(server, input=word, previous_response_id=previous)
            previous = made["id"]
        return prompts_of(server)[-1]

    prompt = serving(scenario, **with_room("yes"))
    turns = "".join(f"<turn>user\n{word}<end>\n<turn>assistant\nyes<end>\n" for word in "ab")
    assert prompt == f"<bos>{turns}<turn>user\nc<end>\n<turn>assistant\n"


def test_the_result_of_a_call_goes_to_the_call(serving):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{{ m.tool_call_id }};{% endfor %}"

    async def scenario(server):
        made = await create(server, tools=[WEATHER], max_output_tokens=200)
        [call] = made["output"]
        server.engine.input_processor.chat_templates.sources["default"] = f"{template}<turn>assistant\n"
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        await create(server, input=[result], previous_response_id=made["id"], max_output_tokens=1)
        return call, prompts_of(server)[-1]

    call, prompt = serving(scenario, options=PARSERS, **with_room(HERMES))
    assert "'name': 'weather'" in prompt and "'city': 'Rome'" in prompt
    assert prompt.endswith(f"tool:sun{call['call_id']};<turn>assistant")


# ---- bounds and owners


def test_the_oldest_responses_are_dropped_and_it_says_so(serving):
    async def scenario(server):
        made = [await create(server) for _ in range(3)]
        return [await server.client.get(f"/v1/responses/{each['id']}") for each in made]

    gone, *kept = serving(scenario, options={"max_stored_responses": 2})
    assert gone.status == 404 and "dropped" in gone.error["message"] and "2 responses" in gone.error["message"]
    assert [answer.status for answer in kept] == [200, 200]


def test_one_key_sees_nothing_of_another(serving):
    mine, yours = {"authorization": "Bearer a"}, {"x_api_key": "b"}

    async def scenario(server):
        made = (await server.client.post("/v1/responses", BODY, **mine)).json
        path, after = f"/v1/responses/{made['id']}", {**BODY, "previous_response_id": made["id"]}
        refused = [
            await server.client.get(path, **yours),
            await server.client.post(f"{path}/cancel", b"", **yours),
            await server.client.ask("DELETE", path, b"", yours),
            await server.client.post("/v1/responses", after, **yours),
        ]
        unknown = await server.client.get("/v1/responses/resp_1", **yours)
        return path, refused, unknown, await server.client.get(path, **mine)

    path, refused, unknown, kept = serving(scenario, keys=("a", "b"))
    told = unknown.error["message"].replace("resp_1", path.rpartition("/")[2])
    assert [answer.status for answer in refused] == [404] * 4 and kept.status == 200
    assert {answer.error["message"] for answer in refused} == {told}


@pytest.mark.parametrize("field", ["store", "background"])
def test_a_server_that_keeps_nothing_says_so(serving, field):
    async def scenario(server):
        return await server.client.post("/v1/responses", {**BODY, field: True}), await create(server)

    refused, made = serving(scenario, options={"max_stored_responses": 0})
    assert (refused.status, refused.error["param"]) == (400, field) and made["store"] is False
