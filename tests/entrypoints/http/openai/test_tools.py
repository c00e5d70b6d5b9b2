"""Tools, thinking and shapes in `/v1/chat/completions` and `/v1/completions`: a model says a text, a client gets it."""

import json

import pytest

from tests.entrypoints.http.saying_model import TOKENIZER, saying

PATH = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "the cat"}], "temperature": 0}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, parameters=SCHEMA):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather"), tool("time", None)]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
HERMES = {"tool_call_parser": "hermes"}
QWEN = {"reasoning_parser": "qwen3"}


def asked(ask, says, body, options=None, **settings):
    """The one choice that a request gets when the model says a text."""
    answer = ask(PATH, {**ASKED, **body}, options=options or {}, **saying(says, **settings))
    assert answer.status == 200, answer.body
    return answer.json["choices"][0]


def streamed(ask, says, body, options=None, index=0):
    """The deltas of one choice and its finish reason."""
    answer = ask(PATH, {**ASKED, **body, "stream": True}, options=options or {}, **saying(says))
    assert answer.status == 200 and answer.events[-1] == "[DONE]", answer.body
    choices = [c for event in answer.events[:-1] for c in event["choices"] if c["index"] == index]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    return [c["delta"] for c in choices], choices[-1]["finish_reason"]


def calls_of(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def put_together(deltas):
    """The message that deltas add up to, as OpenAI's clients do it."""
    message = {"tool_calls": []}
    for delta in deltas:
        for name in ("content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):
                assert piece["type"] == "function" and piece["id"] and piece["function"]["name"]
                message["tool_calls"].append({"id": piece["id"], "function": dict(piece["function"])})
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


# ---- calls that the model decides on


def test_calls_come_beside_the_text_before_them(ask):
    choice = asked(ask, CALLS, {"tools": TOOLS}, HERMES)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Let me see."
    assert calls_of(message) == [("weather", {"city": "Rome"}), ("time", {})]
    assert all(call["type"] == "function" for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_an_answer_of_calls_alone_has_no_content(ask):
    message = asked(ask, CALLS.removeprefix("Let me see.\n"), {"tools": TOOLS}, HERMES)["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 2


def test_a_text_without_calls_is_just_a_text(ask):
    choice = asked(ask, "a < b", {"tools": TOOLS}, HERMES)
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] == "a < b"
    assert "tool_calls" not in choice["message"]


def test_calls_stream_as_a_beginning_and_pieces_of_arguments(ask):
    deltas, finish_reason = streamed(ask, CALLS, {"tools": TOOLS}, HERMES)
    message = put_together(deltas)
    assert finish_reason == "tool_calls" and message["content"] == "Let me see."
    assert calls_of(message) == [("weather", {"city": "Rome"}), ("time", {})]
    assert len(deltas) > 10, "the arguments come as they are written"


def test_without_parallel_calls_only_the_first_is_told(ask):
    body = {"tools": TOOLS, "parallel_tool_calls": False}
    assert calls_of(asked(ask, CALLS, body, HERMES)["message"]) == [("weather", {"city": "Rome"})]
    deltas, finish_reason = streamed(ask, CALLS, body, HERMES)
    assert calls_of(put_together(deltas)) == [("weather", {"city": "Rome"})] and finish_reason == "tool_calls"


def test_a_call_that_is_cut_off_ends_with_length(ask):
    choice = asked(ask, CALLS, {"tools": TOOLS, "max_tokens": 72}, HERMES)
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_with_tool_choice_none_nothing_is_a_call(ask):
    choice = asked(ask, CALLS, {"tools": TOOLS, "tool_choice": "none"}, HERMES)
    assert choice["message"]["content"] == CALLS and choice["finish_reason"] == "stop"


def test_every_answer_of_n_has_calls_of_its_own(ask):
    body = {"tools": TOOLS, "n": 2, "temperature": 1, "seed": 1}
    answer = ask(PATH, {**ASKED, **body}, options=HERMES, **saying(CALLS))
    ids = [call["id"] for choice in answer.json["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    for index in range(2):
        deltas, finish_reason = streamed(ask, CALLS, body, HERMES, index)
        assert len(put_together(deltas)["tool_calls"]) == 2 and finish_reason == "tool_calls"


def test_log_probabilities_of_every_token_stream_with_the_calls(ask):
    answer = ask(
        PATH,
        {**ASKED, "tools": TOOLS, "logprobs": True, "stream": True, "return_token_ids": True},
        options=HERMES,
        **saying(CALLS),
    )
    choices = [event["choices"][0] for event in answer.events[:-1]]
    num_tokens = sum(len(choice.get("token_ids", ())) for choice in choices)
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == num_tokens > 50


def test_the_format_is_read_off_the_template(ask):
    chat = "{# <tool_call> #}{{ messages[-1].content }}"
    choice = asked(ask, CALLS, {"tools": TOOLS}, {"enable_auto_tool_choice": True}, chat=chat)
    assert len(choice["message"]["tool_calls"]) == 2


# ---- calls that are forced: the grammars are real


FORCED = '[{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "time", "parameters": {}}]'


def test_required_calls_follow_a_grammar_of_all_tools(ask):
    body = {"tools": TOOLS, "tool_choice": "required"}
    choice = asked(ask, FORCED, body)
    assert calls_of(choice["message"]) == [("weather", {"city": "Rome"}), ("time", {})]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    deltas, finish_reason = streamed(ask, FORCED, body)
    assert calls_of(put_together(deltas)) == calls_of(choice["message"]) and finish_reason == "tool_calls"


def test_a_model_that_would_not_call_must_when_calls_are_required(ask):
    city = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [tool("weather", {**city, "additionalProperties": False})]
    body = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    assert calls_of(asked(ask, "no", body)["message"]) == [("weather", {"city": "Rome"})]


def test_a_named_function_is_called_and_the_end_is_ordinary(ask):
    body = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    choice = asked(ask, '{"city": "Rome"}', body)
    assert calls_of(choice["message"]) == [("weather", {"city": "Rome"})] and choice["finish_reason"] == "stop"
    deltas, finish_reason = streamed(ask, '{"city": "Rome"}', body)
    assert calls_of(put_together(deltas)) == [("weather", {"city": "Rome"})] and finish_reason == "stop"


# ---- thinking


THOUGHT = "<think>\nthe dog {\n</think>\n\nthe cat"


def test_thinking_is_told_apart_from_the_answer(ask):
    message = asked(ask, THOUGHT, {}, QWEN)["message"]
    assert message["reasoning"] == "\nthe dog {\n" and message["content"].strip() == "the cat"
    deltas, finish_reason = streamed(ask, THOUGHT, {}, QWEN)
    assert {name: put_together(deltas)[name] for name in ("content", "reasoning")} == {
        name: message[name] for name in ("content", "reasoning")
    }
    assert finish_reason == "stop"


@pytest.mark.parametrize(
    ("path", "asked"), [(PATH, {"messages": [{"role": "user", "content": "x"}]}), ("/v1/completions", {"prompt": "x"})]
)
def test_thinking_ends_when_its_budget_is_used(serving, path, asked):
    start, _, _, end, *_ = script = TOKENIZER.encode("the dog sat on a mat", add_special_tokens=False)

    async def scenario(server):
        server.engine.input_processor.thinking_token_ids = (start, end)
        body = {**asked, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
        answers = [await server.client.post(path, {**body, "thinking_token_budget": budget}) for budget in (-1, 1, 0)]
        return [answer.json["choices"][0]["token_ids"] for answer in answers]

    free, one, none = serving(scenario, **saying("the dog sat on a mat"))
    assert free == script[:5]
    assert one[:3] == [start, script[1], end] and none[:2] == [start, end]


@pytest.mark.parametrize("include_reasoning", [True, False])
def test_the_usage_tells_tokens_of_thinking_where_it_is_looked_for(ask, include_reasoning):
    num_tokens = len(TOKENIZER.encode("\nthe dog {\n", add_special_tokens=False))
    body = {**ASKED, "include_reasoning": include_reasoning, "n": 2, "temperature": 1, "seed": 1}
    usage = ask(PATH, body, options=QWEN, **saying(THOUGHT)).json["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * num_tokens}
    assert usage["completion_tokens"] > 2 * num_tokens
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    last = ask(PATH, body, options=QWEN, **saying(THOUGHT)).events[-2]
    assert {**last["usage"], "prompt_tokens_details": None} == usage
    assert "completion_tokens_details" not in ask(PATH, ASKED, **saying(THOUGHT)).json["usage"]
    usage = ask(PATH, ASKED, options=QWEN, **saying("the dog")).json["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_thinking_that_began_in_the_prompt_and_never_ends_is_no_content(ask):
    chat = "{{ messages[-1].content }}<think>\n"
    message = asked(ask, "the dog", {}, QWEN, chat=chat)["message"]
    assert (message["reasoning"], message["content"]) == ("the dog", None)


def test_thinking_is_left_out_when_it_is_not_wanted(ask):
    message = asked(ask, THOUGHT, {"include_reasoning": False}, QWEN)["message"]
    assert message["reasoning"] is None and message["content"].strip() == "the cat"


def test_without_a_reasoning_parser_thinking_is_content(ask):
    assert asked(ask, THOUGHT, {})["message"]["content"] == THOUGHT


def test_calls_come_after_thinking(ask):
    message = asked(ask, f"<think>hm</think>{CALLS}", {"tools": TOOLS}, {**HERMES, **QWEN})["message"]
    assert message["reasoning"] == "hm" and len(message["tool_calls"]) == 2
    body = {"tools": TOOLS, "tool_choice": "required"}
    message = asked(ask, f"<think>hm [</think>\n\n{FORCED}", body, QWEN)["message"]
    assert message["reasoning"] == "hm [" and len(message["tool_calls"]) == 2


# ---- shapes


ANSWER_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER_SCHEMA, "strict": True}}
OLD_TAG = {
    "type": "structural_tag",
    "triggers": ["<f="],
    "structures": [{"begin": "<f=1>", "schema": {"const": "a"}, "end": "</f>"}],
}
CONTENT = {"type": "json_schema", "json_schema": {"const": "a"}}
TAG = {"type": "tag", "begin": "<f=1>", "content": CONTENT, "end": "</f>"}
NEW_TAG = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}}
CLOSED = {"json": {**ANSWER_SCHEMA, "additionalProperties": False}, "disable_any_whitespace": True}


@pytest.mark.parametrize(
    ("says", "body", "expected"),
    [
        ('{"a": 22}', {"response_format": JSON_SCHEMA}, '{"a": 22}'),
        ('{"b": []}', {"response_format": {"type": "json_object"}}, '{"b": []}'),
        ("the cat", {"response_format": {"type": "text"}}, "the cat"),
        ("maybe", {"structured_outputs": {"choice": ["yes", "perhaps"]}}, "perhaps"),
        ("the", {"structured_outputs": {"regex": "[x-z]{3}"}}, "xxx"),
        ("(x)", {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, "(x)"),
        ('{"a":22}', {"structured_outputs": CLOSED}, '{"a":22}'),
        ("the <f=1>x", {"response_format": OLD_TAG}, 'the <f=1>"a"</f>'),
        ("the <f=1>x", {"response_format": NEW_TAG}, 'the <f=1>"a"</f>'),
        ("the <f=1>x", {"structured_outputs": {"structural_tag": NEW_TAG}}, 'the <f=1>"a"</f>'),
    ],
)
def test_answers_have_the_shape_that_was_asked_for(ask, says, body, expected):
    assert asked(ask, says, body)["message"]["content"] == expected
    answer = ask("/v1/completions", {"prompt": "the", "max_tokens": 60, "temperature": 0, **body}, **saying(says))
    assert answer.json["choices"][0]["text"] == expected


def test_a_shape_begins_after_the_thinking(ask):
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    for says, reasoning in (("<think>\nno{\n</think>\n\nyes", "\nno{\n"), ("yes", None)):
        message = asked(ask, says, body, QWEN)["message"]
        assert (message["content"], message["reasoning"]) == ("yes", reasoning)
        assert put_together(streamed(ask, says, body, QWEN)[0])["content"] == "yes"


def test_a_shape_begins_after_thinking_that_the_prompt_has_begun(ask):
    chat = "{{ messages[-1].content }}<think>\n"
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    message = asked(ask, "hm</think>no", body, QWEN, chat=chat)["message"]
    assert (message["content"], message["reasoning"]) == ("no", "hm")


def test_several_prompts_and_sequences_keep_their_shape(ask):
    body = {"prompt": ["the", "cat"], "n": 2, "max_tokens": 60, "structured_outputs": {"choice": ["yes", "no"]}}
    answer = ask("/v1/completions", body, **saying("no"))
    assert [choice["text"] for choice in answer.json["choices"]] == ["no"] * 4


# ---- shapes and tools


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("tool_parser", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        ("longcat", "\n".join([f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>"] * 2)),
        ("granite", f"<|tool_call|>[{CALL}, {CALL}]"),
        ("jamba", f"<tool_calls>[{CALL}, {CALL}]</tool_calls>"),
        ("phi4_mini_json", f"functools[{CALL}, {CALL}]"),
    ],
)
def test_a_model_may_call_tools_or_answer_in_a_shape_and_nothing_else(ask, tool_parser, calls):
    options = {"tool_call_parser": tool_parser, "enable_auto_tool_choice": True}
    for body in ({"response_format": JSON_SCHEMA}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        body = {**body, "tools": TOOLS}
        choice = asked(ask, calls, body, options)
        assert len(choice["message"]["tool_calls"]) == 2 and choice["finish_reason"] == "tool_calls"
        assert calls_of(choice["message"])[0] == ("weather", {"city": "Rome"})
        one = asked(ask, calls, {**body, "parallel_tool_calls": False}, options)
        assert calls_of(one["message"]) == [("weather", {"city": "Rome"})]
    choice = asked(ask, '{"a": 22}', {"response_format": JSON_SCHEMA, "tools": TOOLS}, options)
    assert choice["message"]["content"] == '{"a": 22}' and choice["finish_reason"] == "stop"
    assert asked(ask, "no", body, options)["message"]["content"] == "no"


def test_without_knowing_how_calls_are_written_a_shape_and_tools_exclude_each_other(ask):
    options = {"tool_call_parser": "pythonic", "enable_auto_tool_choice": True}
    answer = ask(PATH, {**ASKED, "response_format": JSON_SCHEMA, "tools": TOOLS}, options=options, **saying("a"))
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    assert "granite, hermes" in answer.error["message"]


# ---- what cannot be


BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "structures": [{"begin": "a", "end": ""}]}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format"),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag"}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD_SCHEMA}}},
            "response_format",
        ),
        ({"response_format": JSON_SCHEMA, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"response_format": JSON_SCHEMA, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"choice": ["a"]}, "tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"thinking": ["a", "b", True], "choice": ["a"]}}, "structured_outputs"),
        ({"tools": [tool("weather", BAD_SCHEMA)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("weather", BAD_SCHEMA)], "tool_choice": NAMED}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_name_of_the_field(ask, body, parameter):
    for stream in (False, True):
        answer = ask(PATH, {**ASKED, **body, "stream": stream}, options=HERMES, **saying("a"))
        assert (answer.status, answer.error["param"]) == (400, parameter), answer.body


def test_a_shape_needs_thinking_with_one_end(ask):
    body = {**ASKED, "response_format": JSON_SCHEMA}
    answer = ask(PATH, body, options={"reasoning_parser": "openai_gptoss"}, **saying("a"))
    assert (answer.status, answer.error["param"]) == (400, "response_format")
