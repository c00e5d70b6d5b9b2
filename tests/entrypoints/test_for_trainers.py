"""What outputs say to trainers: in choices and streams by HTTP, in answers of the command line, and by gRPC."""

import base64
import io
import json

import msgspec
import numpy as np
import pytest

from jaxpaged.entrypoints.cli.results import answer_object
from jaxpaged.entrypoints.http.openai.completions import CompletionRequest, CompletionStyle, choices
from jaxpaged.messages import CompletionOutput, RequestOutput, SamplingMask
from jaxpaged.sampling_params import SamplingParams
from tests.entrypoints.http.openai.test_text_events import chat_stream, completion_stream

EXPERTS = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
STYLE = CompletionStyle(SamplingParams(), logprobs=False, echo=False, only_echo=False, as_token_ids=False)


def shown(**told):
    """(A choice of a completion, an answer of the command line)."""
    output = RequestOutput("r", "a", [3], None, [CompletionOutput(0, "a", [5, 6], None, None, **told)], True)
    [choice] = choices(CompletionRequest(prompt="a"), STYLE, 0, output, None)
    return msgspec.to_builtins(choice), answer_object(output, output.outputs[0])


def test_masks_are_lists_and_experts_are_a_file():
    for fields in shown(sampling_mask=SamplingMask([[5], [6, 7]]), routed_experts=EXPERTS):
        assert fields["sampling_mask"] == [[5], [6, 7]]
        np.testing.assert_array_equal(np.load(io.BytesIO(base64.b64decode(fields["routed_experts"]))), EXPERTS)


def test_engines_that_tell_nothing_have_no_such_fields():
    for fields in shown():
        assert not {"sampling_mask", "routed_experts"} & fields.keys()


def test_grpc_gives_masks_with_their_tokens_and_experts_with_the_last():
    pytest.importorskip("grpc")
    from jaxpaged.entrypoints.cli.remote_engine import GrowingOutput
    from jaxpaged.entrypoints.grpc.responses import Responses
    from jaxpaged.proto import jaxpaged_pb2 as pb

    responses = Responses("r", None, None, with_prompt=False, with_cached_tokens=False)
    grown = GrowingOutput("r")
    parts = [(5, [[5]], None), (6, [[6, 7]], None), (8, [[8, 9]], EXPERTS)]
    for number, (token, mask, experts) in enumerate(parts, 1):
        is_last = number == len(parts)
        completion = CompletionOutput(0, "a", [token], None, None, "length" if is_last else None)
        completion.sampling_mask, completion.routed_experts = SamplingMask(mask), experts
        written = responses.of(RequestOutput("r", "a", [3], None, [completion], is_last))
        output = grown.grown(pb.GenerateResponse.FromString(written))
    assert output.outputs[0].sampling_mask.token_ids == [[5], [6, 7], [8, 9]]
    np.testing.assert_array_equal(output.outputs[0].routed_experts, EXPERTS)


PIECES = [
    CompletionOutput(0, "a", [5, 6], None, None, sampling_mask=SamplingMask([[5], [6, 7]])),
    CompletionOutput(0, "", [8], None, None, sampling_mask=SamplingMask([[8]])),  # half a character
    CompletionOutput(0, "b", [9], None, None, "length", sampling_mask=SamplingMask([[4, 9]]), routed_experts=EXPERTS),
]
MASKS = [[5], [6, 7], [8], [4, 9]]
STREAM = [RequestOutput("r", None, [1], None, [piece], piece.finished()) for piece in PIECES]


@pytest.mark.parametrize("make", [completion_stream, chat_stream])
def test_the_pieces_of_a_stream_by_http_have_what_the_whole_has(make):
    stream = make()
    lines = b"".join(stream.of(0, output) for output in STREAM).split(b"\n\n")
    told = [each for line in lines if line for each in json.loads(line.removeprefix(b"data: "))["choices"]]
    assert [mask for choice in told for mask in choice.get("sampling_mask", ())] == MASKS
    [experts] = [choice["routed_experts"] for choice in told if "routed_experts" in choice]
    whole, _ = shown(routed_experts=EXPERTS)
    assert experts == told[-1]["routed_experts"] == whole["routed_experts"]
