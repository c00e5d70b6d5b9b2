"""What outputs say to trainers, in JSON: in choices by HTTP, and in answers of the command line."""

import base64
import io

import msgspec
import numpy as np

from jaxpaged.entrypoints.cli.results import answer_object
from jaxpaged.entrypoints.http.openai.completions import CompletionRequest, CompletionStyle, choices
from jaxpaged.messages import CompletionOutput, RequestOutput, SamplingMask
from jaxpaged.sampling_params import SamplingParams

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
