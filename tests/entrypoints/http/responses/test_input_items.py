"""Items to messages: a turn of the model is one message, and few templates take two system messages."""

from jaxpaged.entrypoints.http.responses.conversation import Turns, input_items

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]}


def messages(*items, instructions=None):
    turns = Turns(instructions)
    turns.add_all(items, "input")
    return turns.messages


def test_a_text_is_what_the_user_says():
    assert messages(*input_items("a")) == [{"role": "user", "content": "a"}]


def test_what_the_model_made_in_a_turn_is_one_message():
    [turn] = messages(THOUGHT, SAID, CALL, {**CALL, "call_id": "d"})
    assert turn["content"] == [{"type": "text", "text": "yes"}] and turn["reasoning"] == "hm"
    assert [call["id"] for call in turn["tool_calls"]] == ["c", "d"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


def test_what_comes_between_begins_another_turn():
    made = messages(CALL, RESULT, SAID, SAID, THOUGHT, {"role": "user", "content": "a"})
    roles = [message["role"] for message in made]
    assert roles == ["assistant", "tool", "assistant", "assistant", "assistant", "user"]


def test_the_result_of_a_call_names_its_function():
    tool = messages(CALL, RESULT)[1]
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "c", "name": "f"}


def test_instructions_and_developers_are_one_system_message_at_the_beginning():
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    user = {"role": "user", "content": "u"}
    assert messages(developer, user, instructions="a") == [{"role": "system", "content": "a\n\nb"}, user]
    assert [each["role"] for each in messages(user, developer)] == ["user", "system"]


def test_thinking_without_text_is_no_message():
    assert messages({"type": "reasoning", "summary": []}) == []
