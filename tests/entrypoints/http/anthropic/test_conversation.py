"""Turns of blocks become chat messages."""

import msgspec
import pytest

from jaxpaged.entrypoints.http.anthropic.conversation import chat_messages
from jaxpaged.entrypoints.http.anthropic.protocol import CountTokensRequest
from jaxpaged.serving.errors import ErrorKind, ServingError

USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Lisbon"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
CALL = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Lisbon"}}}


def text(words):
    return {"type": "text", "text": words}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def messages_of(*turns, **fields):
    return chat_messages(msgspec.convert({"model": "m", "messages": list(turns), **fields}, CountTokensRequest))


def test_texts_and_blocks_of_text_mean_the_same():
    expected = [{"role": "user", "content": "hello"}]
    assert messages_of({"role": "user", "content": "hello"}) == messages_of(user(text("hello"))) == expected


@pytest.mark.parametrize("system", ["be kind\nbe brief", [text("be kind"), text("be brief")]])
def test_the_system_prompt_comes_first(system):
    assert messages_of(user(text("a")), system=system)[0] == {"role": "system", "content": "be kind\nbe brief"}


def test_an_empty_system_prompt_is_none():
    assert messages_of(user(text("a")), system="") == messages_of(user(text("a")), system=[])


def test_what_a_client_says_of_its_bills_is_left_out():
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=12ab3;"), text("be kind")]
    assert messages_of(user(text("a")), system=system)[0]["content"] == "be kind"


def test_turns_of_one_role_after_each_other_are_one():
    merged = messages_of(user(text("a")), {"role": "user", "content": "b"}, assistant(text("c")), assistant(text("d")))
    assert merged == [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "cd"}]


def test_calls_and_their_results_are_messages_of_their_own():
    told = messages_of(user(text("weather?")), assistant(text("Let me see."), USE), user(RESULT, text("and tomorrow?")))
    assert told == [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sunny"},
        {"role": "user", "content": "and tomorrow?"},
    ]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({**RESULT, "content": [text("sunny"), text("and warm")]}, "sunny\nand warm"),
        ({"type": "tool_result", "tool_use_id": "t1"}, ""),
        ({**RESULT, "content": "no such city", "is_error": True}, "Error: no such city"),
    ],
)
def test_results_are_texts(result, content):
    assert messages_of(user(text("a")), assistant(USE), user(result))[-1]["content"] == content


def test_thinking_goes_back_to_the_template_and_what_is_redacted_does_not():
    thinking = {"type": "thinking", "thinking": "it is day", "signature": "s"}
    told = messages_of(user(text("a")), assistant(thinking, {"type": "redacted_thinking", "data": "x"}, text("b")))
    expected = {"role": "assistant", "content": "b", "reasoning": "it is day", "reasoning_content": "it is day"}
    assert told[-1] == expected


@pytest.mark.parametrize(
    ("turns", "path"),
    [
        ([], "messages"),
        ([{"role": "user", "content": ""}], "messages[0].content"),
        ([user()], "messages[0].content"),
        ([user({"type": "image", "source": {"type": "url"}})], "messages[0].content[0]"),
        ([user({"type": "document"})], "messages[0].content[0]"),
        ([user(USE)], "messages[0].content[0]"),
        ([{"role": "system", "content": [RESULT]}], "messages[0].content[0]"),
        ([user(text("a")), assistant(RESULT)], "messages[1].content[0]"),
        ([user(text("a"), RESULT)], "messages[0].content[1].tool_use_id"),
        ([user(text("a")), assistant(USE)], "messages"),
        (
            [user(text("a")), assistant(USE), user({**RESULT, "content": [{"type": "image"}]})],
            "messages[2].content[0].content[0]",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused_by_their_place(turns, path):
    with pytest.raises(ServingError) as refusal:
        messages_of(*turns)
    assert (refusal.value.kind, refusal.value.parameter) == (ErrorKind.INVALID, path)
    assert str(refusal.value).startswith(path)


def test_input_that_is_nested_deeply_is_refused():
    deep = {}
    for _ in range(100):
        deep = {"a": deep}
    with pytest.raises(ServingError, match="nested"):
        messages_of(user(text("a")), assistant({**USE, "input": deep}), user(RESULT))
