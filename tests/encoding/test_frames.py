"""What goes through a socket comes out equal; what is not a message is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.errors import CapacityError, EngineError, RequestError, error_named
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVBlockMap,
    SchedulerStats,
    TokenLogprobs,
)
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams


def through(type, value):
    return FrameDecoder(type).decode([bytes(frame) for frame in FrameEncoder().encode(value)])


def block_map(num_blocks=5):
    arrays = [np.arange(num_blocks, dtype=np.int32), np.ones(num_blocks, np.int64), np.arange(num_blocks) % 2 == 0]
    return KVBlockMap(16, ["a", "b"], *arrays)


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), max_size=50),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0, 2),
    stop=st.lists(st.text(min_size=1), max_size=3),
    extra=st.none() | st.dictionaries(st.text(), st.integers(-5, 5) | st.text() | st.lists(st.booleans())),
)
def test_a_request_arrives_as_it_was_sent(ids, seed, temperature, stop, extra):
    params = SamplingParams(
        seed=seed,
        temperature=temperature,
        stop=stop,
        max_tokens=7,
        logit_bias={3: -1.5},
        extra_args=extra,
        output_kind=RequestOutputKind.DELTA,
        allowed_token_ids=[1, 2],
    )
    request = EngineCoreRequest("r", ids, params, 12.5, eos_token_id=2, priority=-1, cache_salt="x")
    assert through(list[EngineCoreRequest], [request]) == [request]


def test_outputs_arrive_as_they_were_sent():
    line = TokenLogprobs([5, 6], [-0.5, float("-inf")], 1)
    whole = EngineCoreOutput("a", [5], 3, 1, [line], [line], "stop", "END")
    outputs = [whole, EngineCoreOutput("b", [], error="x")]
    message = EngineCoreOutputs(outputs, SchedulerStats(4, 2, 1, 0.5))
    assert through(EngineCoreOutputs, message) == message


def test_arrays_travel_outside_of_the_message():
    encoder = FrameEncoder()
    small, large = encoder.encode(block_map(1)), encoder.encode(block_map(100_000))
    assert len(small) == len(large) == 4
    assert len(large[0]) - len(small[0]) < 20
    arrived = through(KVBlockMap, block_map())
    for name in ("owner", "num_owners", "cached"):
        sent = getattr(block_map(), name)
        assert getattr(arrived, name).dtype == sent.dtype
        np.testing.assert_array_equal(getattr(arrived, name), sent)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 0, 2)])
def test_arrays_of_any_shape_arrive(shape):
    sent = KVBlockMap(1, [], *[np.full(shape, 7, np.float32)] * 3)
    np.testing.assert_array_equal(through(KVBlockMap, sent).owner, sent.owner)


def test_numbers_of_numpy_become_plain_numbers():
    assert through(dict[str, float | int], {"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array(["text"]), {"f": print}])
def test_what_is_not_plain_data_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        FrameEncoder().encode(value)


def with_owner(owner, *buffers):
    """A block map whose first array is described by `owner`, with these frames."""
    good = ("<i4", (1,), 0)
    return [msgspec.msgpack.encode([16, [], owner, good, good]), *buffers]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [msgspec.msgpack.encode([16, []])],
        with_owner(("<i4", (1,), 5), b"\0" * 4),
        with_owner(("<i4", (1,), -1), b"\0" * 4),
        with_owner(("<i4", (2,), 0), b"\0" * 4),
        with_owner(("<i4", (-1,), 0), b"\0" * 4),
        with_owner(("<i4", (1,), 0), b"\0" * 3),
        with_owner(("|O", (1,), 0), b"\0" * 8),
        with_owner(("no type", (1,), 0), b"\0" * 4),
        with_owner(("<U1", (1,), 0), b"\0" * 4),
        with_owner("<i4", b"\0" * 4),
        with_owner(3, b"\0" * 4),
    ],
)
def test_frames_that_are_no_such_value_are_refused(frames):
    with pytest.raises(ValueError):
        FrameDecoder(KVBlockMap).decode(frames)


def test_parameters_that_cannot_be_are_refused_on_arrival():
    frames = FrameEncoder().encode([["r", [1], [1, 0.0, 0.0, 1.0, -5.0], 0.0]])
    with pytest.raises(ValueError):
        FrameDecoder(list[EngineCoreRequest]).decode(frames)


def test_errors_keep_their_class_and_message():
    assert isinstance(error_named("CapacityError", "x"), CapacityError)
    assert str(error_named("RequestError", "too long")) == "too long"
    assert isinstance(error_named("RequestError", ""), RequestError)
    assert type(error_named("KeyError", "k")) is EngineError
    assert type(error_named("did_you_mean", "k")) is EngineError
