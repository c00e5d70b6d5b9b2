"""`/v1/chat/completions`, against the engine's own results and against OpenAI's shapes."""

import pytest

from jaxpaged.errors import ConfigError
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
USER = {"role": "user", "content": "the cat"}
PROMPT = "<bos><turn>user\nthe cat<end>\n<turn>assistant\n"
GREEDY = {"messages": [USER], "max_tokens": 4, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT_WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{{ messages[-1].content }}"


def deltas(answer, index=0):
    chunks = [chunk for chunk in answer.events[:-1] if chunk["choices"]]
    return [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]


def streamed_text(answer, index=0):
    return "".join(delta["content"] for delta in deltas(answer, index))


def prompt_of(ask, body, **settings):
    """The text that a body becomes."""
    answer = ask("/v1/chat/completions", {**GREEDY, **body, "return_prompt_text": True}, **settings)
    assert answer.status == 200, answer.body
    return answer.json["prompt_text"]


def test_an_answer_has_the_shape_that_clients_know(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "return_token_ids": True})
    [choice] = answer.json["choices"]
    assert answer.json["object"] == "chat.completion" and answer.json["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert choice["message"]["content"] == TOKENIZER.decode(choice["token_ids"])
    assert answer.json["prompt_token_ids"] == TOKENIZER.encode(PROMPT, add_special_tokens=False)
    assert answer.json["usage"]["prompt_tokens"] == len(answer.json["prompt_token_ids"])
    assert "tool_calls" not in choice["message"] and choice["message"]["reasoning"] is None


def test_messages_go_through_the_chat_template(ask):
    assert prompt_of(ask, {}) == PROMPT
    parts = [{"type": "text", "text": "the"}, {"type": "input_text", "text": "cat"}]
    assert prompt_of(ask, {"messages": [{"role": "user", "content": parts}]}) == PROMPT.replace("the cat", "the\ncat")
    assert prompt_of(ask, {"add_generation_prompt": False}) == PROMPT.removesuffix("<turn>assistant\n")


def test_an_answer_that_was_begun_is_continued(ask):
    messages = [USER, {"role": "assistant", "content": "it sat"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    assert prompt_of(ask, body).endswith("<turn>assistant\nit sat")
    echoed = ask("/v1/chat/completions", {**GREEDY, **body, "echo": True})
    assert echoed.json["choices"][0]["message"]["content"].startswith("it sat")
    stream = ask("/v1/chat/completions", {**GREEDY, **body, "echo": True, "stream": True})
    assert streamed_text(stream) == echoed.json["choices"][0]["message"]["content"]


def test_without_a_limit_the_answer_fills_the_context(ask):
    usage = ask("/v1/chat/completions", {"messages": [USER], "temperature": 0}).json["usage"]
    assert usage["total_tokens"] == 64


def test_max_completion_tokens_goes_before_max_tokens(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "max_completion_tokens": 2})
    assert answer.json["usage"]["completion_tokens"] == 2


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "stream": True})
    *chunks, done = answer.events
    assert done == "[DONE]" and deltas(answer)[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas(answer)[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    whole = ask("/v1/chat/completions", GREEDY).json["choices"][0]["message"]["content"]
    assert streamed_text(answer) == whole


def test_n_answers_stream_each_under_its_own_index(ask):
    body = {"messages": [USER], "n": 3, "seed": 4, "max_tokens": 5}
    whole = ask("/v1/chat/completions", body).json["choices"]
    answer = ask("/v1/chat/completions", {**body, "stream": True})
    assert [streamed_text(answer, i) for i in range(3)] == [choice["message"]["content"] for choice in whole]
    assert all(deltas(answer, i)[0]["role"] == "assistant" for i in range(3))


def test_usage_comes_in_a_last_chunk_without_choices_when_asked_for(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "stream": True, "stream_options": {"include_usage": True}})
    usage = answer.events[-2]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 4
    assert all("usage" not in chunk for chunk in answer.events[:-2])


def test_logprobs_give_the_sampled_token_and_exactly_the_first_candidates(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "logprobs": True, "top_logprobs": 2})
    for entry in answer.json["choices"][0]["logprobs"]["content"]:
        assert entry["bytes"] == list(entry["token"].encode()) and len(entry["top_logprobs"]) == 2
        assert {k: entry["top_logprobs"][0][k] for k in ("token", "logprob")} == {
            k: entry[k] for k in ("token", "logprob")
        }
    without = ask("/v1/chat/completions", {**GREEDY, "logprobs": True})
    assert all(entry["top_logprobs"] == [] for entry in without.json["choices"][0]["logprobs"]["content"])


def test_logprobs_stream_one_entry_per_token(ask):
    answer = ask("/v1/chat/completions", {**GREEDY, "logprobs": True, "top_logprobs": 1, "stream": True})
    whole = ask("/v1/chat/completions", {**GREEDY, "logprobs": True, "top_logprobs": 1})
    parts = [chunk["choices"][0]["logprobs"] for chunk in answer.events[:-1]]
    entries = [entry for part in parts if part for entry in part["content"]]
    assert entries == whole.json["choices"][0]["logprobs"]["content"]


def test_named_tokens_are_scored(ask):
    body = {**GREEDY, "logprobs": True, "logprob_token_ids": [7, 8, 9]}
    for entry in ask("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 3


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_an_empty_list_of_tools_is_none(ask, choice):
    expected = prompt_of(ask, {}, chat=CHAT_WITH_TOOLS)
    assert prompt_of(ask, {"tools": [], **choice}, chat=CHAT_WITH_TOOLS) == expected
    assert ask("/tokenize", {"messages": [USER], "tools": []}).status == 200


def test_tools_reach_the_template(ask):
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        body = {"tools": [TOOL], **choice}
        shown = prompt_of(ask, body, chat=CHAT_WITH_TOOLS, options={"tool_call_parser": "hermes"})
        assert shown == "weather;the cat"


def test_template_variables_reach_the_template(ask):
    chat = "{{ documents[0].title }}|{{ mood }}|{{ reasoning_effort }}"
    body = {"documents": [{"title": "T"}], "chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low"}
    assert prompt_of(ask, body, chat=chat) == "T|good|low"


def test_variables_of_the_server_are_for_requests_that_bring_none_of_the_same_name(ask):
    chat, options = "{{ mood }}|{{ tone }}", {"default_chat_template_kwargs": {"mood": "good", "tone": "low"}}
    assert prompt_of(ask, {}, chat=chat, options=options) == "good|low"
    assert prompt_of(ask, {"chat_template_kwargs": {"mood": "bad"}}, chat=chat, options=options) == "bad|low"
    answer = ask("/tokenize", {"messages": GREEDY["messages"], "return_token_strs": True}, chat=chat, options=options)
    assert "".join(answer.json["token_strs"]).replace("▁", " ").strip().endswith("good|low")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_of_the_server_that_every_chat_has_ends_the_start(ask, name):
    with pytest.raises(ConfigError, match=f"default_chat_template_kwargs sets {name}"):
        ask("/health", options={"default_chat_template_kwargs": {name: 1}})


@pytest.mark.parametrize("name", ["self", "cls", "args", "kwargs", "context", "loop", "", "a b"])
def test_template_variables_may_have_any_name_that_is_not_the_templates_own(ask, name):
    assert prompt_of(ask, {"chat_template_kwargs": {name: 5}}, chat="{{ messages[0].content }}") == "the cat"


def test_a_template_of_the_request_needs_the_operators_consent(ask):
    body = {"chat_template": "mine: {{ messages[0].content }}"}
    refused = ask("/v1/chat/completions", {**GREEDY, **body})
    assert (refused.status, refused.error["param"]) == (400, "chat_template")
    assert prompt_of(ask, body, options={"trust_request_chat_template": True}) == "mine: the cat"


def test_old_names_of_the_reasoning_are_understood(ask):
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "because"}]
    assert prompt_of(ask, {"messages": messages}, chat="{{ messages[0].reasoning }}") == "because"


def test_an_assistants_message_may_be_nothing_but_calls(ask):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    chat = "{{ messages[1].content }}{{ messages[1].tool_calls[0].function.arguments.a }}{{ messages[2].content }}"
    assert prompt_of(ask, {"messages": messages}, chat=chat) == "13"


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0].type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, TOOL], "tool_choice": "none"}, "tools[1].function.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_every_invalid_field_gives_400_with_its_name(ask, change, parameter):
    answer = ask("/v1/chat/completions", {**GREEDY, **change})
    assert (answer.status, answer.error["param"]) == (400, parameter), answer.body


def test_a_model_without_a_chat_template_says_so(ask):
    answer = ask("/v1/chat/completions", GREEDY, chat=None)
    assert (answer.status, answer.error["param"]) == (400, "chat_template")


def test_response_format_text_and_tool_choice_none_change_nothing(ask):
    body = {**GREEDY, "response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": False}
    assert ask("/v1/chat/completions", body).status == 200
