"""Requests for streams of every API, in all their forms, and their answers without what is drawn or is the time."""

import re

from tests.entrypoints.http.responses.answering import HERMES, WEATHER, with_room

THOUGHT = "<think>it is a cat</think>\nthe cat is hi"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SKILLED = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
USAGE = {"stream_options": {"include_usage": True}}
EVERY = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
DRAWN = {"temperature": 1, "seed": 1, "stream": True}
IDS = re.compile(rb'("(?:id|item_id|call_id|tool_call_id)":")[^"]+|("(?:created|created_at|completed_at)":)[\d.]+')

COMPLETIONS = [
    {},
    {"n": 2},
    {"logprobs": 2},
    {"echo": True, "logprobs": 1},
    {"stop": ["g", "no"]},
    {"return_token_ids": True},
    USAGE,
    EVERY,
    {"prompt": ["the cat", "b"], "n": 2, **USAGE},
    {"stream_interval": 3},
    {"max_tokens": 1},
    {"n": 3, "logprobs": 1, **EVERY},
    {"echo": True, "max_tokens": 0},
]
CHATS = [
    {},
    {"n": 2, **USAGE},
    {"logprobs": True, "top_logprobs": 2},
    {"return_token_ids": True},
    EVERY,
    {"tools": [TOOL], "n": 2, **USAGE},
    {"include_reasoning": False},
    {"stop": ["e"]},
]
MESSAGES = [{}, {"tools": [{"name": "weather", "input_schema": {"type": "object"}}]}, {"stop_sequences": ["e"]}]
RESPONSES = [{}, {"tools": [WEATHER]}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}


def requests():
    """((path, body), ...) and settings of the server: every form, of models that count, think, and call a tool."""
    body = {"prompt": "the cat", "max_tokens": 12, "ignore_eos": True, **DRAWN}
    yield [("/v1/completions", {**body, **more}) for more in COMPLETIONS], {}
    of_paths = (
        ("/v1/chat/completions", CHATS, {**CHAT, **DRAWN}),
        ("/v1/messages", MESSAGES, {**CHAT, "temperature": 1}),
        ("/v1/responses", RESPONSES, {"input": "hi", "max_output_tokens": 30}),
    )
    for text in (None, THOUGHT, HERMES):
        bodies = [
            (path, {**body, **more})
            for path, forms, body in of_paths
            for more in forms
            if ("tools" in more) == (text is HERMES)
        ]
        yield bodies, {**with_room(text), "options": {} if text is None else SKILLED}


def without_chance(body):
    """An answer whose ids and times are those of every other."""
    return IDS.sub(lambda found: (found[1] or found[2]) + b"0", body)
