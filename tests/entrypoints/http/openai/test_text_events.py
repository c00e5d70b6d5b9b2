"""Events whose surroundings are encoded once are those that are encoded as a whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.generation.answer import AnswerReader, Reading
from jaxpaged.entrypoints.http.openai.chat_write import ChatStream
from jaxpaged.entrypoints.http.openai.completion_write import CompletionStream, CompletionStyle
from jaxpaged.entrypoints.http.openai.fields import UsageOptions
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest
from jaxpaged.entrypoints.http.openai.usage import UsageCounter
from jaxpaged.messages import CompletionOutput, RequestOutput
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
USAGE = UsageOptions(at_end=True, in_every_chunk=False)
AWKWARD_ID = 'cmpl-"\\u0000"'


def completion_stream(counter):
    style = CompletionStyle(logprobs=False, echo=False, only_echo=False, as_token_ids=False)
    return CompletionStream(AWKWARD_ID, "m\u00e9", style, TOKENIZER, USAGE, counter, n=2, with_ids=False)


def chat_stream(counter):
    wanted = ChatCompletionRequest(messages=[])
    return ChatStream(wanted, AWKWARD_ID, "m", "assistant", "", USAGE, counter, lambda: AnswerReader(Reading(), None))


def events(stream, outputs, is_chat):
    stream._chunks._new.keywords["created"] = 1
    of = stream.of if is_chat else lambda output: stream.of(0, output)
    return [event for output in outputs for event in of(output)]


@pytest.mark.parametrize("make", [completion_stream, chat_stream])
@given(st.lists(st.tuples(st.integers(0, 1), st.text(max_size=4), st.lists(st.integers(0, 9), max_size=2)), max_size=6))
def test_the_short_way_writes_what_the_long_one_writes(make, pieces):
    ends = [None] * (len(pieces) - 1) + ["stop"]
    outputs = [
        RequestOutput("r", None, [1, 2], None, [CompletionOutput(index, text, ids, None, None, end)], end is not None)
        for (index, text, ids), end in zip(pieces, ends)
    ]
    short, long = (make(UsageCounter(with_details=False)) for _ in range(2))
    assert short._only_text
    long._only_text = False
    is_chat = make is chat_stream
    assert events(short, outputs, is_chat) == events(long, outputs, is_chat)
    assert short.last() == long.last()
