"""An answer cut into blocks: the pieces of a stream add up to the whole."""

import hashlib

import hypothesis
import msgspec
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.anthropic.protocol import (
    Ending,
    MessagesResponse,
    MessagesUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from jaxpaged.entrypoints.http.anthropic.write import MessageStream, content_of
from jaxpaged.parsing.deltas import Delta, ToolCallDelta

USAGE = MessagesUsage(3, 4)
MESSAGE = MessagesResponse(id="msg", model="m", content=[], usage=USAGE)


def call(index, arguments, name=None):
    return Delta(tool_call=ToolCallDelta(index, name and f"id{index}", name, arguments))


ANSWER = [
    Delta(reasoning="it is "),
    Delta(reasoning="day"),
    Delta(content="Let me "),
    Delta(content="see."),
    call(0, '{"city": ', "weather"),
    call(0, '"Lisbon"}'),
    call(1, "{}", "time"),
    Delta(content="Done."),
]


def events_of(deltas, cut=lambda i: True):
    """All events of an answer, as clients decode them; a new result comes wherever `cut` says."""
    stream, events, group = MessageStream(), [], []
    events += stream.start(MESSAGE)
    for i, delta in enumerate(deltas):
        group.append(delta)
        if cut(i):
            events += stream.of(group)
            group = []
    events += [*stream.of(group), *stream.end(Ending("end_turn", None), USAGE)]
    return [msgspec.json.decode(msgspec.json.encode(event)) for event in events]


def added_up(events):
    """What a client makes of a stream: the blocks, checked for being opened and closed one after the other."""
    blocks, open_index = [], None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_index is None and event["index"] == len(blocks)
                open_index, pieces = event["index"], []
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_index
                kind, value = event["delta"].pop("type"), next(iter(event["delta"].values()))
                if kind == "input_json_delta":
                    pieces.append(value)
                else:
                    blocks[-1][kind.removesuffix("_delta")] += value
            case "content_block_stop":
                assert event["index"] == open_index
                if pieces:
                    blocks[-1]["input"] = msgspec.json.decode("".join(pieces))
                open_index = None
    assert open_index is None
    return blocks


def test_an_answer_is_cut_into_blocks_of_a_kind():
    digest = hashlib.sha256(b"it is day").hexdigest()
    assert content_of(ANSWER) == [
        ThinkingBlock("it is day", digest),
        TextBlock("Let me see."),
        ToolUseBlock("id0", "weather", {"city": "Lisbon"}),
        ToolUseBlock("id1", "time", {}),
        TextBlock("Done."),
    ]


def test_an_answer_of_nothing_is_an_empty_text():
    assert content_of([]) == [TextBlock("")]
    assert added_up(events_of([])) == [{"type": "text", "text": ""}]


def test_input_that_was_cut_off_is_an_empty_object():
    assert content_of([call(0, '{"city": "Li', "weather")]) == [ToolUseBlock("id0", "weather", {})]
    assert content_of([call(0, "[1]", "weather")]) == [ToolUseBlock("id0", "weather", {})]


def test_events_come_in_the_order_that_clients_expect():
    kinds = [event["type"] for event in events_of(ANSWER[2:6])]
    text = ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", "ping", *text, *text, "message_delta", "message_stop"]


def test_thinking_ends_with_its_signature():
    deltas = [event["delta"]["type"] for event in events_of(ANSWER[:2]) if event["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta"]


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.lists(st.sampled_from(["text", "thinking", "call", "more"]), max_size=12), st.randoms())
def test_a_stream_adds_up_to_the_whole_answer(kinds, random):
    deltas, num_calls = [], 0
    for kind in kinds:
        in_call = bool(deltas) and deltas[-1].tool_call is not None
        if kind == "call":
            deltas.append(call(num_calls, '{"a":1}', f"tool{num_calls}"))
            num_calls += 1
        elif kind == "more" and in_call:
            deltas.append(call(num_calls - 1, " "))
        elif kind == "thinking":
            deltas.append(Delta(reasoning="t "))
        else:
            deltas.append(Delta(content="c "))
    whole = msgspec.json.decode(msgspec.json.encode(content_of(deltas)))
    assert added_up(events_of(deltas, lambda i: random.random() < 0.5)) == whole
