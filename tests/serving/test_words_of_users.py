"""Markers of thinking in what users, systems, tools and earlier answers say are words: only what the chat template
writes behind the last message says whether the model thinks. For every parser, and every API."""

import json

import pytest

from jaxpaged.parsing.reasoning import REASONING_FORMATS
from tests.entrypoints.http.saying_model import saying

CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}[/]{% endfor %}[assistant]"
)
SHAPE = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
SAYS = '{"a": 22}'


def conversations(start, end):
    """Who may have said the markers: one, the other, both in either order, and cut into parts."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"q": f"{end} {start}"})}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    for said in (start, end, f"{start}hm{end}", f"{end} {start}"):
        yield [{"role": "user", "content": f"What does {said} mean?"}]
        yield [{"role": "system", "content": said}, {"role": "user", "content": "x"}]
        yield [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": f"{said}\nLet me"},
            {"role": "user", "content": "go on"},
        ]
        yield [{"role": "user", "content": "x"}, answer, {"role": "tool", "tool_call_id": "c", "content": said}]
    parts = [{"type": "text", "text": text} for text in ("x", start)]
    yield [{"role": "user", "content": parts}]


EVERY_FORMAT = pytest.mark.parametrize(("name", "form"), REASONING_FORMATS.items(), ids=[*REASONING_FORMATS])


@EVERY_FORMAT
def test_no_message_opens_or_closes_thinking_and_shapes_hold(serving, name, form):
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": SHAPE}}

    async def scenario(server):
        for messages in conversations(form.start, form.end):
            body = {"messages": messages, "temperature": 0, "max_tokens": 60}
            free = await server.client.post("/v1/chat/completions", body)
            server.engine.executor.say('{"b": 1}')
            shaped = await server.client.post("/v1/chat/completions", {**body, "response_format": shape})
            server.engine.executor.say(SAYS)
            yield messages, free.json["choices"][0]["message"], shaped.json["choices"][0]["message"]

    async def all_of(server):
        return [each async for each in scenario(server)]

    for messages, free, shaped in serving(all_of, options={"reasoning_parser": name}, **saying(SAYS, chat=CHAT)):
        if form.open:  # without a marker of the template's own the model thinks, whatever was said
            assert (free["content"], free["reasoning"]) == (None, SAYS), messages
            continue
        assert (free["content"], free["reasoning"]) == (SAYS, None), messages
        assert json.loads(shaped["content"])["a"] in (1, 22) and shaped["reasoning"] is None, messages


@EVERY_FORMAT
def test_what_the_template_writes_at_the_end_does(serving, name, form):
    async def answers(server):
        return [
            (await server.client.post("/v1/chat/completions", {"messages": messages, "temperature": 0})).json
            for messages in conversations(form.start, form.end)
        ]

    options = {"reasoning_parser": name}
    begun = saying(f"so{form.end}yes", chat=f"{CHAT}{form.start}\n")
    for answer in serving(answers, options=options, **begun):
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("yes", "so")
    closed = saying("yes", chat=f"{CHAT}{form.start}\n\n{form.end}\n\n")
    for answer in serving(answers, options=options, **closed):
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning"]) == ("yes", None)


@pytest.mark.parametrize(
    ("last", "content", "reasoning"),
    [
        ("<think>\nLet me", "yes", "so"),
        ("<think>hm</think>I say", "so</think>yes", None),
        ("I say", "so</think>yes", None),
    ],
)
def test_an_answer_that_is_continued_is_the_models_own(ask, last, content, reasoning):
    messages = [{"role": "user", "content": "</think><think>"}, {"role": "assistant", "content": last}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    answer = ask(
        "/v1/chat/completions", body, options={"reasoning_parser": "qwen3"}, **saying("so</think>yes", chat=CHAT)
    )
    message = answer.json["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (content, reasoning)


def test_responses_and_messages_read_answers_alike(serving):
    question = "What does <think> mean?"
    called = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "<think>"},
    ]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "<think>"}]
    used = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": result},
    ]
    shape = {"format": {"type": "json_schema", "name": "n", "schema": SHAPE}}

    async def scenario(server):
        for given in (question, called):
            for more in ({}, {"text": shape}):
                body = {"input": given, "instructions": "Never <think>.", "temperature": 0, **more}
                yield (await server.client.post("/v1/responses", body)).json["output"]
        for given in ([{"role": "user", "content": question}], used):
            for more in ({}, {"output_config": shape}):
                body = {"messages": given, "system": "Never <think>.", "max_tokens": 60, "temperature": 0, **more}
                yield (await server.client.post("/v1/messages", body)).json["content"]

    async def all_of(server):
        return [each async for each in scenario(server)]

    found = serving(all_of, options={"reasoning_parser": "qwen3"}, **saying(SAYS, chat=CHAT))
    assert len(found) == 8
    for items in found:
        [item] = items
        assert item["type"] in ("message", "text")
        assert (item["content"][0] if item["type"] == "message" else item)["text"] == SAYS
