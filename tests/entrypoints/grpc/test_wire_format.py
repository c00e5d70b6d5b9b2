"""Bytes that are written by hand are those of the library."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.entrypoints.grpc.responses import Responses
from jaxpaged.entrypoints.grpc.wire_format import encoded, nested, packed, varint
from jaxpaged.messages import CompletionOutput, RequestOutput
from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.engine.small_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
PIECES = st.tuples(
    st.integers(0, 200), st.text(max_size=4) | st.just("x" * 20_000), st.lists(st.integers(0, 2**31 - 1))
)


@given(st.text(min_size=1, max_size=200), st.lists(st.lists(PIECES, max_size=3), max_size=3))
def test_more_text_and_tokens_are_written_as_the_library_writes_them(request_id, results):
    options = {"with_prompt": False, "with_cached_tokens": False}
    by_hand, by_library = (Responses(request_id, None, TOKENIZER, **options) for _ in range(2))
    by_library._is_plain = lambda output: False
    for pieces in [[(0, "a", [1])], *results]:
        completions = [CompletionOutput(index, text, ids, None, None) for index, text, ids in pieces]
        output = RequestOutput("r", None, [1], None, completions, False)
        assert by_hand.of(output) == by_library.of(output)
    assert by_hand._begun and vars(by_hand._usage) == vars(by_library._usage)


@given(st.integers(0, 2**63 - 1))
def test_numbers_are_read_as_they_were_written(number):
    assert varint(number) == encoded(number)
    usage = pb.Usage.FromString(b"\x08" + varint(number % 2**31))
    assert usage.prompt_tokens == number % 2**31


def test_an_event_is_a_field_of_a_message():
    event = pb.GenerateStreamEvent(request_id="r", response=pb.GenerateResponse(request_id="r"))
    message = nested(1, nested(1, b"r") + nested(2, nested(1, b"r")))
    assert pb.GenerateStreamResponse.FromString(message).events == [event]
    assert list(pb.TokenIds.FromString(packed(1, [1, 300, 2**21])).ids) == [1, 300, 2**21]
