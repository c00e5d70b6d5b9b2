"""`POST /v1/responses`: what comes back, with and without a stream."""

import pytest

from tests.entrypoints.http.responses.answering import (
    HERMES,
    PARSERS,
    TOKENIZER,
    WEATHER,
    events_of,
    put_together,
    record_shapes,
    with_room,
)
from tests.entrypoints.http.saying_model import saying

GREEDY = {"temperature": 0, "max_output_tokens": 300}
TOOLS = {"tools": [WEATHER]}
THOUGHT = "<think>let me see</think>the sun"


def output_of(respond, body, text, **settings):
    answer = respond({**GREEDY, **body}, text, **settings)
    assert answer.status == 200, answer.body
    return answer.json["output"]


def test_a_response_has_the_shape_that_clients_know(respond):
    body = {"metadata": {"a": "b"}, "instructions": "be kind", "user": "me", "top_p": 0.5, "max_output_tokens": 50}
    response = respond({"temperature": 0.5, **body}, "the sun").json
    assert response["object"] == "response" and response["id"].startswith("resp_")
    assert response["status"] == "completed" and response["completed_at"] >= response["created_at"]
    assert response["error"] is None and response["incomplete_details"] is None
    [message] = response["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "the sun", "annotations": [], "logprobs": []}]
    assert {name: response[name] for name in body} == body and response["temperature"] == 0.5
    assert response["store"] is True and response["tools"] == [] and response["tool_choice"] == "auto"


def test_usage_counts_prompt_output_and_thinking(respond):
    prompt = TOKENIZER.encode("<bos><turn>user\nthe cat<end>\n<turn>assistant\n", add_special_tokens=False)
    usage = respond(GREEDY, THOUGHT, options=PARSERS).json["usage"]
    num_output = len(TOKENIZER.encode(THOUGHT, add_special_tokens=False)) + 1
    assert usage == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": len(TOKENIZER.encode("let me see", add_special_tokens=False))},
        "total_tokens": len(prompt) + num_output,
    }


@pytest.mark.parametrize("tells", [True, False])
def test_cached_tokens_are_told_where_the_server_says_so(serving, tells):
    async def scenario(server):
        body = {"input": "the cat sat on the mat and the dog", **GREEDY, "max_output_tokens": 2}
        await server.client.post("/v1/responses", body)
        return (await server.client.post("/v1/responses", body)).json["usage"]["input_tokens_details"]

    details = serving(scenario, options={"enable_prompt_tokens_details": tells})
    assert (details["cached_tokens"] > 0) is tells


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_prompt_is_lent_is_said_and_passed_on(serving, stream):
    lent, asked = {"do_remote_prefill": True, "remote_port": 7}, {"do_remote_decode": True}

    async def scenario(server):
        server.engine.input_processor._kv_peers = ("kv_producer", "")
        generate = server.engine.generate

        async def lending(*arguments, **options):
            async for output in generate(*arguments, **options):
                output.kv_transfer_params = lent if output.finished else None
                yield output

        server.engine.generate = lending
        body = {"input": "the cat", "max_output_tokens": 1, "stream": stream, "vllm_xargs": {"a": 1}}
        answer = await server.client.post("/v1/responses", {**body, "kv_transfer_params": asked})
        assert answer.status == 200, answer.body
        [(_, params, _)] = server.engine.seen
        assert params.extra_args == {"a": 1, "kv_transfer_params": asked}
        return events_of(answer)[-1]["response"] if stream else answer.json

    assert serving(scenario)["kv_transfer_params"] == lent


def test_an_answer_that_is_cut_off_is_incomplete(respond):
    response = respond({**GREEDY, "max_output_tokens": 3}, "the cat sat on the mat").json
    assert response["status"] == "incomplete" and response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_of_nothing_is_an_empty_message(respond):
    [message] = output_of(respond, {}, "")
    assert message["content"][0]["text"] == ""


def test_thinking_is_an_item_before_the_message(respond):
    thinking, message = output_of(respond, {}, THOUGHT, options=PARSERS)
    assert thinking["type"] == "reasoning" and thinking["summary"] == []
    assert thinking["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert message["content"][0]["text"] == "the sun"


def test_calls_are_items_with_ids_of_their_own(respond):
    message, first, second = output_of(respond, TOOLS, f"wait {HERMES}\n{HERMES}", options=PARSERS)
    assert message["content"][0]["text"] == "wait"
    assert first["type"] == second["type"] == "function_call" and first["status"] == "completed"
    assert first["name"] == "weather" and first["arguments"] == '{"city": "Rome"}'
    assert len({first["id"], second["id"], first["call_id"], second["call_id"]}) == 4


def test_without_parallel_calls_the_first_one_is_all(respond):
    body = {"tools": [WEATHER], "parallel_tool_calls": False}
    [call] = output_of(respond, body, f"{HERMES}\n{HERMES}", options=PARSERS)
    assert call["type"] == "function_call"


def test_a_named_function_is_called_with_the_text_as_arguments(serving):
    choice = {"type": "function", "name": "weather"}

    async def scenario(server):
        shapes = record_shapes(server)
        answer = await server.client.post("/v1/responses", {"input": "a", **GREEDY, **TOOLS, "tool_choice": choice})
        return answer, shapes[0]

    answer, shape = serving(scenario, **with_room('{"city": "Rome"}'))
    [call] = answer.json["output"]
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Rome"}')
    assert shape.json == {"type": "object"} and answer.json["tool_choice"] == choice


def test_allowed_tools_are_all_that_the_template_sees(serving):
    tools = [WEATHER, {**WEATHER, "name": "time"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}

    async def scenario(server):
        server.engine.input_processor.chat_templates.sources["default"] = (
            "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        )
        body = {"input": "a", "tools": tools, "tool_choice": choice, "max_output_tokens": 1}
        answer = await server.client.post("/v1/responses", body)
        assert answer.status == 200 and answer.json["tools"] == tools, answer.body
        return server.engine.seen[0][0]["prompt"]

    assert serving(scenario, options=PARSERS) == "time"


def test_the_shape_of_the_text_reaches_the_engine(serving):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}

    async def scenario(server):
        shapes = record_shapes(server)
        for text in ({"format": described}, {"format": {"type": "json_object"}}, {"format": {"type": "text"}}):
            answer = await server.client.post("/v1/responses", {"input": "a", "text": text, "max_output_tokens": 1})
            assert answer.status == 200 and answer.json["text"]["format"] == text["format"], answer.body
        return shapes

    as_schema, as_object, as_text = serving(scenario)
    assert as_schema.json == schema and as_object.json_object is True and as_text is None


def test_sampling_fields_reach_the_engine(serving):
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [9],
        "min_tokens": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "bad_words": ["dog"],
        "skip_special_tokens": False,
    }

    async def scenario(server):
        body = {"input": "a", "max_output_tokens": 3, **fields, "logit_bias": {"5": 1}, "vllm_xargs": {"a": 1}}
        assert (await server.client.post("/v1/responses", body)).status == 200
        return server.engine.seen[0][1]

    params = serving(scenario)
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.max_tokens == 3 and params.logit_bias == {5: 1.0} and params.extra_args == {"a": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("settings", [{}, {"options": PARSERS}])
def test_log_probabilities_belong_to_the_text_alone(respond, stream, settings):
    body = {**GREEDY, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": stream}
    answer = respond(body, THOUGHT if settings else "the sun", **settings)
    response = events_of(answer)[-1]["response"] if stream else answer.json
    entries = response["output"][-1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).startswith("the sun")
    assert len(entries) == len(TOKENIZER.encode("the sun", add_special_tokens=False)) + 1
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    if stream:
        deltas = [event for event in events_of(answer) if event["type"] == "response.output_text.delta"]
        assert entries[: len(entries) - 1] == [entry for delta in deltas for entry in delta["logprobs"]]


# ---- streams


def test_the_events_of_a_message_come_in_order(respond):
    kinds = [event["type"] for event in events_of(respond({**GREEDY, "stream": True}, "the sun"))]
    without_deltas = [kind for kind in kinds if not kind.endswith(".delta")]
    assert "response.output_text.delta" in kinds and without_deltas == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_every_snapshot_is_of_its_own_time(respond):
    events = events_of(respond({**GREEDY, "stream": True}, "the sun"))
    responses = [event["response"] for event in events if "response" in event]
    assert [each["status"] for each in responses] == ["in_progress", "in_progress", "completed"]
    assert responses[0]["output"] == [] and responses[0]["usage"] is None and responses[-1]["usage"] is not None
    added = next(event for event in events if event["type"] == "response.output_item.added")
    assert added["item"]["content"] == []


@pytest.mark.parametrize("run", [1, 32])
def test_a_stream_adds_up_to_the_response_however_results_are_cut(serving, run):
    text = f"{THOUGHT} {HERMES}"

    async def scenario(server):
        server.engine.executor.longest_run = run
        body = {"input": "a", **GREEDY, "tools": [WEATHER], "max_output_tokens": 200, "stream": True}
        return await server.client.post("/v1/responses", body)

    events = events_of(serving(scenario, options=PARSERS, **with_room(text)))
    final = events[-1]["response"]
    assert put_together(events) == [
        {"type": "reasoning", "text": "let me see"},
        {"type": "message", "text": "the sun"},
        {"type": "function_call", "text": '{"city": "Rome"}'},
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"] and final["status"] == "completed"


def test_a_failure_after_the_first_event_is_an_event(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.engine.executor.fail_at[3] = "result"
        answer = await server.client.post("/v1/responses", {"input": "the cat", "stream": True})
        failed = events_of(answer)[-1]
        kept = await server.client.get(f"/v1/responses/{failed['response']['id']}")
        return answer, failed, kept

    answer, failed, kept = serving(scenario)
    assert answer.status == 200 and failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error" and failed["response"]["output"]
    assert kept.json == failed["response"]


def test_a_failure_before_the_first_event_has_its_own_status(serving):
    async def scenario(server):
        server.engine.is_dead = True
        return [await server.client.post("/v1/responses", {"input": "a", "stream": stream}) for stream in (True, False)]

    for answer in serving(scenario):
        assert answer.status == 500 and answer.error["type"] == "InternalServerError"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_response(serving, stream):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        if not stream:
            server.engine.go_on.clear()
        await server.client.post("/v1/responses", {"input": "a", "stream": stream}, leave_after=1 if stream else 0)
        return server.engine.aborted

    assert len(serving(scenario)) == 1


def test_a_budget_of_thinking_reaches_the_engine_or_is_refused_by_its_name(serving):
    async def scenario(server):
        refused = await server.client.post("/v1/responses", {"input": "a", **GREEDY, "thinking_token_budget": 3})
        server.engine.input_processor.thinking_token_ids = (20, 21)
        answer = await server.client.post("/v1/responses", {"input": "a", **GREEDY, "thinking_token_budget": 3})
        return refused, answer.status, [params.thinking_token_budget for _, params, _ in server.engine.seen]

    refused, status, budgets = serving(scenario, **saying("a"))
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")
    assert status == 200 and budgets[-1] == 3
