"""What SamplingParams accepts, refuses and normalises."""

import logging
import math
from typing import get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import CONTAINERS, RANDOM_SEED, BeamSearchParams, RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = [
    ("n", [0, -1, 16385, True, 1.0, "1", None]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, "1", True, None]),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF, [1], False]),
    ("repetition_penalty", [0, -1.0, NAN, INF, "x", 1e-300, 1e300]),
    ("temperature", [-0.1, 2.5, NAN, INF, -INF, "0.5", True]),
    ("top_p", [0.0, -0.1, 1.1, NAN, INF, True]),
    ("top_k", [-2, 1.5, True, "5", 2**31]),
    ("min_p", [-0.1, 1.1, NAN, "0"]),
    ("seed", [1.0, True, "7", 2**64, -(2**63) - 1]),
    ("stop", ["", ["a", ""], [1], 5, {"a": 1}, ["w"] * 129, "w" * 1025]),
    ("stop_token_ids", [[-1], [1.0], [True], ["1"], 5, [2**31]]),
    ("bad_words", ["", [""], [3], ["w"] * 129, ["w" * 1025]]),
    ("max_tokens", [0, -1, 1.5, True, "9"]),
    ("min_tokens", [-1, True, 0.5, 17]),
    ("thinking_token_budget", [-2, True, 0.5, 2**31]),
    ("logprobs", [-2, True, 1.5, "5"]),
    ("prompt_logprobs", [-2, True, 1.5]),
    ("prompt_logprob_start", [-1, True, 1.5, None, 3]),
    ("logprob_token_ids", [[], [-1], list(range(129)), "12"]),
    ("logit_bias", [{1: NAN}, {1: INF}, {1: "x"}, {-1: 1.0}, {"a": 1.0}, {1.5: 1.0}, [1]]),
    ("logit_bias", [dict.fromkeys(range(1025), 1.0)]),
    ("allowed_token_ids", [[], [-1], [True], "1"]),
    ("routed_experts_prompt_start", [-1, True, 1.5]),
    ("trace_decode_token_ids", [[], [-1], [True], "1"]),
    ("output_kind", ["sometimes", 3, True, None]),
    ("extra_args", [[1], {"a": 2**64}, {"a": {"b": [-(2**63) - 1]}}, {1: 2}, {"a": object()}]),
    ("include_stop_str_in_output", [1, "yes", None]),
    ("ignore_eos", [0, "no"]),
    ("detokenize", [1]),
    ("skip_special_tokens", [1]),
    ("spaces_between_special_tokens", [0]),
    ("skip_reading_prefix_cache", [1]),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{i}") for name, values in REFUSED for i, value in enumerate(values)],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.parameter == name


def test_the_message_says_what_the_values_and_what_to_do():
    with pytest.raises(RequestError, match=r"^temperature is 2\.5; it must be at most 2\.$"):
        SamplingParams(temperature=2.5)
    with pytest.raises(RequestError, match=r"^top_p is 0\.0; it must be more than 0\.$"):
        SamplingParams(top_p=0.0)
    with pytest.raises(RequestError, match=r"^top_k is -2; it must be at least -1 \(0 or -1 keeps all tokens\)\.$"):
        SamplingParams(top_k=-2)
    with pytest.raises(RequestError, match=r"min_tokens is 9, more than max_tokens, which is 8\. Raise"):
        SamplingParams(max_tokens=8, min_tokens=9)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert params.detokenize and params.skip_special_tokens and params.spaces_between_special_tokens
    assert not (params.include_stop_str_in_output or params.ignore_eos or params.skip_reading_prefix_cache)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_the_ends_of_every_range_are_accepted():
    SamplingParams(presence_penalty=-2, frequency_penalty=2, temperature=2, top_p=1, min_p=1, top_k=-1, seed=-(2**63))
    SamplingParams(n=16384, max_tokens=None, min_tokens=10**6, logprobs=-1, prompt_logprobs=0, repetition_penalty=1e-3)


def test_greedy_switches_off_what_limits_random_draws():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=7, min_p=0.2)
    assert params.greedy
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


def test_several_greedy_sequences_would_be_equal_and_are_refused():
    with pytest.raises(RequestError) as caught:
        SamplingParams(n=2, temperature=0)
    assert caught.value.parameter == "n"


def test_a_tiny_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "0.001" in caplog.text


def test_values_are_normalised():
    params = SamplingParams(
        stop="END",
        bad_words="no",
        seed=-1,
        top_k=-1,
        stop_token_ids=(4, 4, 2),
        output_kind="delta",
        logit_bias={"17": 300, 3: -300, 4: 1},
        temperature=1,
    )
    assert (params.stop, params.bad_words, params.seed, params.top_k) == (["END"], ["no"], RANDOM_SEED, 0)
    assert params.stop_token_ids == [4, 2]
    assert [SamplingParams(thinking_token_budget=n).thinking_token_budget for n in (-1, 0, 9)] == [None, 0, 9]
    assert params.output_kind is RequestOutputKind.DELTA
    assert params.logit_bias == {17: 100.0, 3: -100.0, 4: 1.0}
    assert type(params.temperature) is float


def test_stop_texts_need_text():
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_prompt_logprobs_need_the_whole_prompt_to_be_computed():
    assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache is True
    assert SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=1, prompt_logprob_start=2).skip_reading_prefix_cache is False


def test_logprob_token_ids_set_the_number_of_logprobs():
    assert SamplingParams(logprob_token_ids=[5, 3]).logprobs == 2
    assert SamplingParams(logprob_token_ids=[5, 3], logprobs=2).logprobs == 2
    with pytest.raises(RequestError) as caught:
        SamplingParams(logprob_token_ids=[5, 3], logprobs=1)
    assert caught.value.parameter == "logprobs"


def test_stop_ids_are_counted_only_when_min_tokens_must_mask_them():
    many = list(range(500))
    assert len(SamplingParams(stop_token_ids=many).stop_token_ids) == 500
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop_token_ids=many, min_tokens=1)
    assert caught.value.parameter == "stop_token_ids"


def test_unknown_names_are_errors_that_name_the_nearest_one():
    with pytest.raises(RequestError, match="Did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 0.5})
    with pytest.raises(RequestError, match="unknown sampling parameter 'bad_words_token_ids'"):
        SamplingParams.from_dict({"bad_words_token_ids": [[1]]})
    with pytest.raises(RequestError, match="unknown sampling parameter 'thinking_token_ids'"):
        SamplingParams.from_dict({"thinking_token_ids": [1, 2]})
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)
    assert SamplingParams.from_dict({"top_k": 3, "logit_bias": {"2": 1}}).logit_bias == {2: 1.0}


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(name):
    params = SamplingParams(**{name: [0, 99]})
    params.verify(vocab_size=100, max_logprobs=20)
    with pytest.raises(RequestError, match=r"99, but the vocabulary has 99 ids") as caught:
        params.verify(vocab_size=99, max_logprobs=20)
    assert caught.value.parameter == name


def test_biased_ids_must_be_in_the_vocabulary():
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias={100: 1.0}).verify(vocab_size=100, max_logprobs=20)
    assert caught.value.parameter == "logit_bias"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited_by_the_engine(name):
    SamplingParams(**{name: 20}).verify(vocab_size=100, max_logprobs=20)
    SamplingParams(**{name: -1}).verify(vocab_size=100, max_logprobs=100)
    for wanted in (21, -1):
        with pytest.raises(RequestError, match="at most 20") as caught:
            SamplingParams(**{name: wanted}).verify(vocab_size=100, max_logprobs=20)
        assert caught.value.parameter == name


@pytest.mark.parametrize(
    "words",
    [[[1]] * 129, [[]], [[1] * 129], [[1] * 128] * 8 + [[1]], [[100]]],
    ids=["too many", "empty", "too long", "too long together", "outside the vocabulary"],
)
def test_bad_words_as_tokens_must_fit_the_sampler(words):
    params = SamplingParams(bad_words=["x"])
    params.bad_words_token_ids = words
    with pytest.raises(RequestError) as caught:
        params.verify(vocab_size=100, max_logprobs=20)
    assert caught.value.parameter == "bad_words"


def test_the_largest_bad_words_fit():
    params = SamplingParams(bad_words=["x"])
    params.bad_words_token_ids = [[99] * 128] * 8
    params.verify(vocab_size=100, max_logprobs=20)


def test_a_clone_shares_nothing_that_changes():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, extra_args={"k": 1}, stop_token_ids=[3])
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    clone.extra_args["k"] = 2
    clone.stop_token_ids.append(9)
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})
    assert (params.extra_args, params.stop_token_ids) == ({"k": 1}, [3])
    fields = msgspec.structs.fields(SamplingParams)
    changeable = [each.name for each in fields if {list, dict} & {get_origin(part) for part in get_args(each.type)}]
    assert set(changeable) == set(CONTAINERS), "what a clone copies"


def test_children_differ_by_their_seed():
    params = SamplingParams(n=3, seed=10)
    assert [(child.n, child.seed) for child in map(params.child, range(3))] == [(1, 10), (1, 11), (1, 12)]
    assert SamplingParams(n=3).child(1).seed is None
    assert SamplingParams(n=3, seed=-1).child(1).seed == RANDOM_SEED
    # The seed wraps at 64 bits, and never becomes -1, which would mean no seed at all.
    assert SamplingParams(n=2, seed=2**64 - 1).child(1).seed == 0
    assert SamplingParams(n=2, seed=-2).child(1).seed == 2**64 - 1


SOME_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.01, 2.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(-1, 1000),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-200, 200), max_size=5),
    output_kind=st.sampled_from(RequestOutputKind),
    extra_args=st.none() | st.dictionaries(st.text(), st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)),
)


@given(SOME_PARAMS)
def test_params_survive_a_message(params):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params


def test_beam_search_params_are_checked():
    params = BeamSearchParams(beam_width=4, max_tokens=8)
    assert (params.temperature, params.length_penalty, params.ignore_eos) == (0.0, 1.0, False)
    for values in ({"beam_width": 0}, {"max_tokens": 0}, {"length_penalty": NAN}, {"temperature": -1.0}):
        with pytest.raises(RequestError) as caught:
            BeamSearchParams(**{"beam_width": 4, "max_tokens": 8} | values)
        assert caught.value.parameter == next(iter(values))
