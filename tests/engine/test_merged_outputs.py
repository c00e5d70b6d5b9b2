"""What waits to be said is one output a request, and nothing of it is lost."""

import msgspec
import pytest

from jaxpaged.engine.merged_outputs import GROWING, as_one, join, merged, without
from jaxpaged.messages import EngineCoreOutput, EngineCoreOutputs, ProcessedLogprob, SchedulerStats, TokenLogprobs


def said(name, *tokens, **fields):
    return EngineCoreOutput(name, list(tokens), **fields)


def test_what_several_steps_gave_is_one_output_a_request():
    steps = [
        [said("a", 1), said("b", 2)],
        [said("b", 3, 4, num_preemptions=1), said("c", 5)],
        [said("a", finish_reason="abort"), said("c", 6)],
    ]
    assert merged(steps) == [
        said("a", 1, finish_reason="abort"),
        said("b", 2, 3, 4, num_preemptions=1),
        said("c", 5, 6),
    ]


def test_steps_that_came_together_are_a_run_of_them():
    steps = [EngineCoreOutputs([said("a", token)], SchedulerStats(token, num_steps=token)) for token in (1, 2, 3)]
    assert as_one(steps[:1]) is steps[0]
    assert as_one(steps) == EngineCoreOutputs([said("a", 1, 2, 3)], SchedulerStats(3, num_steps=6))


def test_what_aborted_requests_had_to_say_is_forgotten():
    outputs = [said("a", 1), said("b", 2), said("c", finish_reason="abort")]
    assert without(outputs, ["c", "a", "unknown"]) == [said("b", 2)]


def test_a_request_that_has_ended_says_no_more():
    with pytest.raises(AssertionError, match="a had ended"):
        join(said("a", 1, finish_reason="stop"), said("a", 2))


VALUES = {
    "num_cached_tokens": 8,
    "num_preemptions": 2,
    "new_token_ids": [7],
    "new_logprobs": [TokenLogprobs([7], [-1.0], 1)],
    "processed_logprobs": [ProcessedLogprob(-0.5, -0.5)],
    "sampling_mask": [[5, 7]],
    "routed_experts": ["an array"],
    "prompt_logprobs": [TokenLogprobs([6], [-2.0], 1)],
    "finish_reason": "error",
    "stop_reason": 7,
    "error": "bad",
    "error_parameter": "prompt",
    "pooled": "a vector",
    "times": (1.0, 2.0),
    "kv_transfer_params": {"remote_port": 7},
    "loaded": {"host": 32},
    "weight_spans": [(0, ""), (3, "step 1")],
    "old_kv_from": 3,
}


@pytest.mark.parametrize("name", EngineCoreOutput.__struct_fields__[1:])
def test_no_field_is_forgotten(name):
    """Whichever of two outputs says it. A new field needs a value here, and its kind in `merged_outputs.py`."""
    value = VALUES[name]
    later = said("a")
    join(later, msgspec.structs.replace(said("a"), **{name: value}))
    assert getattr(later, name) == value
    if name not in ("num_cached_tokens", "num_preemptions", "finish_reason"):
        first = msgspec.structs.replace(said("a"), **{name: value})
        join(first, said("a", num_cached_tokens=8))
        assert getattr(first, name) == value
    if name in GROWING:
        both = said("a", **({name: list(value)} if name != "new_token_ids" else {}))
        both = msgspec.structs.replace(both, **{name: list(value)})
        join(both, msgspec.structs.replace(said("a"), **{name: list(value)}))
        assert getattr(both, name) == value * 2
