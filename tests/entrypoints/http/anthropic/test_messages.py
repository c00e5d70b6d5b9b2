"""`/v1/messages`, against the engine's own results and against Anthropic's shapes."""

import asyncio
import json

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.anthropic.protocol import MessagesRequest
from jaxpaged.entrypoints.http.app import create_app
from tests.engine.small_tokenizer import make_tokenizer
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service
from tests.entrypoints.http.saying_model import saying

TOKENIZER = make_tokenizer()
PATH = "/v1/messages"
USER = {"role": "user", "content": "the cat"}
PROMPT = "<bos><turn>user\nthe cat<end>\n<turn>assistant\n"
GREEDY = {"model": "fake", "messages": [USER], "max_tokens": 4, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "How it is", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Lisbon"}}</tool_call>'
TOOLS = {**GREEDY, "max_tokens": 200, "tools": [TOOL]}
HERMES = {"options": {"tool_call_parser": "hermes"}}
QWEN = {"options": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}}


def events(answer):
    """(name, data) of all events of a stream."""
    frames = [frame.split("\n") for frame in answer.body.decode().split("\n\n") if frame]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in frames), frames
    parsed = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in frames]
    assert all(name == data["type"] for name, data in parsed)
    return parsed


def streamed(answer):
    """What a stream adds up to: content blocks, and the data of the end."""
    content, end = [], None
    for name, data in events(answer):
        if name == "content_block_start":
            content.append(data["content_block"])
        elif name == "content_block_delta":
            kind = data["delta"]["type"].removesuffix("_delta")
            block, key = content[data["index"]], {"input_json": "json"}.get(kind, kind)
            block[key] = block.get(key, "") + data["delta"].get(kind, data["delta"].get("partial_json"))
        elif name == "message_delta":
            end = data
    for block in content:
        if "json" in block:
            block["input"] = json.loads(block.pop("json"))
    return content, end


def without_ids(content):
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def prompts_of(serving, *bodies, **settings):
    """The texts that bodies become for the engine."""

    async def scenario(server):
        for body in bodies:
            answer = await server.client.post(PATH, {**GREEDY, **body})
            assert answer.status == 200, answer.body
        return [prompt["prompt"] for prompt, _, _ in server.engine.seen]

    return serving(scenario, **settings)


def test_an_answer_has_the_shape_that_clients_know(ask):
    message = ask(PATH, GREEDY).json
    ids = TOKENIZER.encode(PROMPT, add_special_tokens=False)
    chat = ask("/v1/chat/completions", {"messages": [USER], "max_tokens": 4, "temperature": 0}).json
    assert message.pop("id").startswith("msg")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": chat["choices"][0]["message"]["content"]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(ids),
            "output_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def test_a_stream_has_the_events_that_clients_know_and_adds_up_to_the_answer(ask):
    answer = ask(PATH, {**GREEDY, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in events(answer)]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    whole = ask(PATH, GREEDY).json
    start = events(answer)[0][1]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    content, end = streamed(answer)
    assert content == whole["content"] and end["usage"] == whole["usage"]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


def test_the_conversation_goes_through_the_chat_template(serving):
    system = {"system": [{"type": "text", "text": "be kind"}]}
    plain, with_system, begun = prompts_of(
        serving, {}, system, {"messages": [USER, {"role": "assistant", "content": "it sat"}]}
    )
    assert plain == PROMPT
    assert with_system == PROMPT.replace("<bos>", "<bos><turn>system\nbe kind<end>\n")
    assert begun == PROMPT + "it sat"


def test_thinking_effort_and_further_variables_reach_the_template(serving):
    chat = "{{ enable_thinking }}|{{ reasoning_effort }}|{{ mood }}"
    bodies = [
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "chat_template_kwargs": {"mood": "ok"}},
    ]
    assert prompts_of(serving, *bodies, chat=chat) == ["False||", "True||", "True|low|ok"]


def test_variables_of_the_server_are_for_requests_that_say_nothing_of_them(serving):
    chat = "{{ enable_thinking }}|{{ mood }}"
    options = {"default_chat_template_kwargs": {"enable_thinking": False, "mood": 1}}
    bodies = [{}, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}]
    assert prompts_of(serving, *bodies, chat=chat, options=options) == ["False|1", "True|1"]


def test_sampling_parameters_reach_the_engine(serving):
    body = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop_sequences": ["zz"], "max_tokens": 3}

    async def scenario(server):
        await server.client.post(PATH, {**GREEDY, **body, "metadata": {"user_id": "me"}})
        [(_, params, _)] = server.engine.seen
        return params

    params = serving(scenario)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 7, 3)
    assert params.stop == ["zz"]


@pytest.mark.parametrize("thinking_ids", [None, (20, 21)])
def test_the_budget_of_thinking_limits_it_where_the_model_has_tokens_around_it(serving, thinking_ids):
    async def scenario(server):
        server.engine.input_processor.thinking_token_ids = thinking_ids
        for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, {"type": "disabled"}):
            answer = await server.client.post(PATH, {**GREEDY, "max_tokens": 1025, "thinking": thinking})
            assert answer.status == 200, answer.body
        return [params.thinking_token_budget for _, params, _ in server.engine.seen]

    assert serving(scenario, **saying("a")) == [None if thinking_ids is None else 1024, None, None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "the cat sat"),
        ({"stop_sequences": ["sat", "dog"]}, "stop_sequence", "sat", "the cat "),
        ({"max_tokens": 2}, "max_tokens", None, None),
    ],
)
def test_how_an_answer_ended_is_said(ask, stream, change, reason, sequence, text):
    body = {**GREEDY, "max_tokens": 50, "stream": stream, **change}
    answer = ask(PATH, body, **saying("the cat sat"))
    content, end = streamed(answer) if stream else (answer.json["content"], {"delta": answer.json})
    assert (end["delta"]["stop_reason"], end["delta"]["stop_sequence"]) == (reason, sequence)
    assert text is None or content == [{"type": "text", "text": text}]


def test_an_answer_that_fills_the_context_says_so(ask):
    assert ask(PATH, {**GREEDY, "max_tokens": 32000}).json["stop_reason"] == "model_context_window_exceeded"


def test_cached_tokens_are_told_apart_only_where_the_operator_wants_it(serving):
    async def scenario(server):
        await server.client.post(PATH, GREEDY)
        return (await server.client.post(PATH, GREEDY)).json["usage"]

    hidden, told = serving(scenario), serving(scenario, options={"enable_prompt_tokens_details": True})
    assert hidden["cache_read_input_tokens"] == 0 < told["cache_read_input_tokens"]
    assert told["input_tokens"] + told["cache_read_input_tokens"] == hidden["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_blocks_and_end_the_turn(ask, stream):
    answer = ask(PATH, {**TOOLS, "stream": stream}, **HERMES, **saying(f"Let me see. {CALL}\n{CALL}"))
    content, end = streamed(answer) if stream else (answer.json["content"], {"delta": answer.json})
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Lisbon"}}
    assert without_ids(content) == [{"type": "text", "text": "Let me see."}, use, use]
    assert content[1]["id"] != content[2]["id"] and end["delta"]["stop_reason"] == "tool_use"


def test_only_one_call_comes_when_parallel_ones_are_disabled(ask):
    choice = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    answer = ask(PATH, {**TOOLS, **choice}, **HERMES, **saying(f"{CALL}\n{CALL}"))
    assert [block["type"] for block in answer.json["content"]] == ["tool_use"]


@pytest.mark.parametrize("hides", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_a_block_that_can_be_left_out(ask, stream, hides):
    says_it = saying("<think>\nit is day\n</think>\n\nHello")
    body = {**GREEDY, "max_tokens": 100, "stream": stream}
    shown, hidden = (
        ask(PATH, {**body, "thinking": {"type": "adaptive", "display": "summarized"}}, **QWEN, **says_it),
        ask(PATH, {**body, "thinking": hides}, **QWEN, **says_it),
    )
    read = (lambda answer: streamed(answer)[0]) if stream else (lambda answer: answer.json["content"])
    thinking, text = read(shown)
    assert thinking["type"] == "thinking" and "it is day" in thinking["thinking"] and thinking["signature"]
    assert text["text"].strip() == "Hello" and read(hidden) == [text]


def test_tools_reach_the_template_unless_none_is_chosen(serving):
    chat = "{% for tool in tools or [] %}{{ tool.function | tojson }};{% endfor %}{{ messages[-1].content }}"
    bodies = [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": []}]
    bodies += [{"tools": [], "tool_choice": {"type": kind}} for kind in ("auto", "none")]
    with_tools, none, *empty = prompts_of(serving, *bodies, chat=chat, max_model_len=256, **HERMES)
    function = {"name": "weather", "description": "How it is", "parameters": SCHEMA}
    assert with_tools == f"{json.dumps(function)};the cat" and {none, *empty} == {"the cat"}


def test_tokens_are_counted_as_the_engine_counts_them(serving):
    body = {**GREEDY, "system": "be kind", "tools": [TOOL], "tool_choice": {"type": "auto"}}

    async def scenario(server):
        count = await server.client.post(f"{PATH}/count_tokens", body)
        return count.json, (await server.client.post(PATH, body)).json["usage"]

    count, usage = serving(scenario, **HERMES)
    assert count == {"input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_aborted_is_an_error(serving, stream):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        asking = asyncio.ensure_future(server.client.post(PATH, {**GREEDY, "max_tokens": 40, "stream": stream}))
        while not server.engine.executor.executed:
            await asyncio.sleep(0)
        server.engine.go_on.clear()
        await server.client.post("/abort_requests", {"request_ids": []})
        await server.engine.abort(server.service.traffic.engine_ids())
        server.engine.go_on.set()
        return await asking

    answer = serving(scenario)
    error = events(answer)[-1][1] if answer.status == 200 else answer.json
    assert error["error"]["type"] == "overloaded_error" and "aborted" in error["error"]["message"]


def test_a_failure_after_the_first_event_ends_the_stream_with_an_error_event(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        server.engine.executor.fail_at[3] = "result"
        return await server.client.post(PATH, {**GREEDY, "max_tokens": 20, "stream": True})

    *before, (name, data) = events(serving(scenario))
    assert before[0][0] == "message_start" and all(each != "message_stop" for each, _ in before)
    assert name == "error" and data["error"]["type"] == "api_error"


def test_a_client_that_leaves_ends_its_request(serving):
    async def scenario(server):
        server.engine.executor.longest_run = 1
        await server.client.post(PATH, {**GREEDY, "max_tokens": 40, "stream": True}, leave_after=1)
        return server.engine.aborted

    assert len(serving(scenario)) == 1


WRONG = [
    ({"model": 5}, "model"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x" * 80}]}, "the prompt has 99 tokens"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": list("abcde")}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences[0]"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"metadata": "me"}, "metadata"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "always"}}, "thinking.type"),
    (
        {
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "max_tokens": 2000,
            "tools": [TOOL],
            "tool_choice": {"type": "any"},
        },
        "thinking",
    ),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]


def test_every_invalid_field_gives_400_with_its_name(serving):
    async def scenario(server):
        for change, field in WRONG:
            body = {key: value for key, value in {**GREEDY, **change}.items() if value is not None}
            answer = await server.client.post(PATH, body)
            assert answer.status == 400 and answer.error["type"] == "invalid_request_error", (change, answer.body)
            assert field in answer.error["message"], (change, answer.body)

    serving(scenario, **HERMES)


@pytest.mark.parametrize("stream", [False, True])
def test_schemas_that_no_grammar_can_be_made_of_are_refused_by_their_field(ask, stream):
    schema = {"type": "object", "properties": {"city": {"type": "string", "not": {"const": "Rome"}}}}
    bodies = {
        "tools": {"tools": [{**TOOL, "input_schema": schema}], "tool_choice": {"type": "any"}},
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    for field, body in bodies.items():
        answer = ask(PATH, {**GREEDY, **body, "stream": stream}, **saying("{}"))
        assert answer.status == 400 and answer.error["message"].startswith(field), answer.body


def test_a_format_comes_after_thinking_and_not_together_with_forced_calls(ask):
    body = {**GREEDY, "max_tokens": 100, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    answer = ask(PATH, body, **QWEN, **saying('<think>hm</think>{"city":"Rome"}'))
    assert [block["type"] for block in answer.json["content"]] == ["thinking", "text"]
    assert json.loads(answer.json["content"][1]["text"]) == {"city": "Rome"}
    answer = ask(PATH, {**body, "tools": [TOOL]}, **HERMES, **saying('{"city":"Rome"}'))
    assert [block["type"] for block in answer.json["content"]] == ["text"]
    refused = ask(PATH, {**body, "tools": [TOOL], "tool_choice": {"type": "any"}}, **HERMES)
    assert refused.status == 400 and "tool_choice" in refused.error["message"]


KEYS = st.sampled_from(["type", "name", "text", "role", "content", "format", "schema"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from([2**64, 0.5, "", "auto", "text", "any", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)
FIELDS = st.sampled_from([field.name for field in msgspec.structs.fields(MessagesRequest)])


def test_whatever_a_field_holds_is_served_or_refused():
    @hypothesis.settings(max_examples=80, deadline=None)
    @hypothesis.given(st.dictionaries(FIELDS, ANYTHING, min_size=1, max_size=2), st.booleans())
    def one_request(change, stream):
        answer = loop.run(client.post(PATH, {**GREEDY, "stream": stream, **change}))
        assert answer.status in (200, 400, 404), answer.body
        if answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream"):
            assert events(answer)[-1][0] == "message_stop"

    with asyncio.Runner() as loop:
        service = make_service({"tool_call_parser": "hermes"})
        client = Client(create_app(service))
        one_request()
        assert len(service.traffic) == 0


def test_tools_need_a_server_that_looks_for_calls(ask):
    answer = ask(PATH, TOOLS)
    assert answer.status == 400 and "--enable-auto-tool-choice" in answer.error["message"]
