"""Bytes of a stream, at known times, become vLLM's figures, however they are cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.tools.bench.requests import MAX_EVENT_BYTES, AnswerStream, Outcome

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def text(piece, **more):
    return event({"choices": [{"index": 0, "text": piece, **more}]})


def delta(**fields):
    return event({"choices": [{"index": 0, "delta": fields}]})


def read(*arrivals, start=100.0):
    """The outcome of a request that was sent at `start`, of which bytes came at times."""
    stream = AnswerStream(Outcome(start_time=start, prompt_len=5))
    for now, data in arrivals:
        stream.feed(data, now)
    stream.end()
    return stream.outcome


def test_times_are_those_of_chunks_and_the_usage_does_not_prolong_the_answer():
    found = read(
        (100.5, text("a")),
        (100.7, text("b")),
        (101.2, text("c", finish_reason="length")),
        (109.0, event(USAGE)),
        (109.5, event(b"[DONE]")),
    )
    assert found.success and found.generated_text == "abc"
    assert found.ttft == pytest.approx(0.5) and found.itl == pytest.approx([0.2, 0.5])
    assert found.latency == pytest.approx(1.2) and found.num_chunks == 3
    assert (found.prompt_len, found.output_tokens) == (7, 3)


def test_a_chunk_of_a_completion_counts_though_its_text_is_empty():
    found = read((100.5, text("")), (100.7, text("b")))
    assert found.ttft == pytest.approx(0.5) and found.itl == pytest.approx([0.2])


@pytest.mark.parametrize(
    "first", [{"content": "a"}, {"reasoning": "a"}, {"reasoning_content": "a"}, {"tool_calls": [{"index": 0}]}]
)
def test_a_chat_begins_with_output_not_with_its_role(first):
    found = read((100.1, event(ROLE)), (100.5, delta(**first)), (100.8, delta(content="b")), (100.9, delta()))
    assert found.ttft == pytest.approx(0.5) and found.itl == pytest.approx([0.3, 0.1])


def test_a_chat_without_text_ends_where_its_last_chunk_came():
    end = event({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]})
    found = read((100.1, event(ROLE)), (100.4, end), (100.5, event(USAGE)))
    assert found.success and found.ttft == found.latency == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (event(USAGE), "without any output"),
        (event(ROLE), "without any output"),
        (b"", "without any output"),
        (event(b"{nonsense"), "not what the API says"),
        (event({"choices": 5}), "not what the API says"),
        (event({"error": {"message": "the engine died", "code": 500}}), "the engine died"),
        (text("a") + event({"error": "it broke"}), "it broke"),
    ],
)
def test_what_is_wrong_is_said_and_fails_the_request(data, words):
    found = read((100.5, data))
    assert not found.success and words in found.error


def test_comments_and_other_fields_of_events_are_skipped():
    found = read((100.5, b": ping\n\nevent: x\nid: 3\r\n" + text("a").replace(b"\n", b"\r\n")))
    assert found.success and found.generated_text == "a"


def test_an_event_without_an_end_is_not_kept_for_ever():
    found = read((100.5, b"data: " + b"x" * MAX_EVENT_BYTES))
    assert "longer than" in found.error


@given(st.lists(st.integers(0, 600), max_size=12))
def test_cuts_change_nothing(cuts):
    whole = delta(role="assistant", content="") + delta(content="é") + delta(content="b") + event(USAGE)
    places = sorted({0, *(min(cut, len(whole)) for cut in cuts), len(whole)})
    found = read(*((200.0, whole[begin:end]) for begin, end in itertools.pairwise(places)))
    assert found == read((200.0, whole)) and found.generated_text == "éb"
