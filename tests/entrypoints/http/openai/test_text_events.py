"""Events whose surroundings are encoded once are those that are encoded as a whole."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.openai.chat import ChatStream, ParsedChat
from jaxpaged.entrypoints.http.openai.completions import CompletionStream
from jaxpaged.entrypoints.http.openai.fields import StreamOptions
from jaxpaged.entrypoints.http.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxpaged.entrypoints.http.respond import Parsed
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serving.generate import EngineRequest
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.prompts import TokenPrompt
from tests.engine.small_tokenizer import make_tokenizer

SERVICE = SimpleNamespace(
    options=ServerOptions.from_options({}),
    engine=SimpleNamespace(input_processor=SimpleNamespace(tokenizer=make_tokenizer())),
)
GENERATION = EngineRequest('cmpl-"\\u0000"', [TokenPrompt([1, 2])], SamplingParams(n=2))
USAGE = {"stream_options": StreamOptions(include_usage=True)}


def completion_stream():
    return CompletionStream(SERVICE, Parsed(CompletionRequest(prompt="a", n=2, **USAGE), "m\u00e9", GENERATION))


def chat_stream():
    return ChatStream(SERVICE, ParsedChat(ChatCompletionRequest(messages=[], **USAGE), "m", GENERATION))


def events(stream, outputs):
    stream._chunks._new.keywords["created"] = 1
    return b"".join(stream.of(0, output) for output in outputs) + stream.end()


@pytest.mark.parametrize("make", [completion_stream, chat_stream])
@given(st.lists(st.tuples(st.integers(0, 1), st.text(max_size=4), st.lists(st.integers(0, 9), max_size=2)), max_size=6))
def test_the_short_way_writes_what_the_long_one_writes(make, pieces):
    ends = [None] * (len(pieces) - 1) + ["stop"]
    outputs = [
        RequestOutput("r", None, [1, 2], None, [CompletionOutput(index, text, ids, None, None, end)], end is not None)
        for (index, text, ids), end in zip(pieces, ends)
    ]
    short, long = make(), make()
    assert short._only_text
    long._only_text = False
    assert events(short, outputs) == events(long, outputs)
