"""Whatever a client writes into any field is refused at intake by the field's name, or served; nobody else notices."""

import math

import numpy as np
import pytest

from jaxpaged.engine.input.processor import TOKENIZATION_KEYS
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import FILLED_IN, SamplingParams
from tests.engine.fake_engine import make_engine, run_to_end

HALF = "\ud800"  # half of a surrogate pair: Python and JSON can write it, and it cannot be encoded, hashed or sent
DEEP: list = []
for _ in range(3000):
    DEEP = [DEEP]
TEXTS = [HALF, "a" + HALF, "\udcff", "\x00", "\U0010ffff", "", " ", "a" * 5000]
HOSTILE = [
    *TEXTS,
    *([text] for text in TEXTS),
    {HALF: 1},
    {"a": HALF},
    {"a": {"b": [HALF]}},
    {1: 2},
    {"1": HALF},
    {},
    [],
    (),
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63),
    10**5000,
    0.0,
    -0.5,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    b"\xff",
    [b"a"],
    object(),
    [object()],
    [None],
    [[]],
    [-1],
    [2**40],
    [True],
    [1.0],
    DEEP,
    range(3),
    {1, 2},
    np.int64(3),
    np.float32(0.5),
    np.arange(3),
    np.nan,
    SamplingParams,
    lambda: 1,
    (text for text in "ab"),
    1j,
]
FIELDS = [name for name in SamplingParams.__struct_fields__ if name not in FILLED_IN]
TAKES_TEXT = {
    "stop": (lambda text: text, lambda text: ["a", text]),
    "bad_words": (lambda text: [text],),
    "extra_args": (lambda text: {text: 1}, lambda text: {"a": [{"b": text}]}, lambda text: {"a": {text: 1}}),
    "structured_outputs": (
        lambda text: {"regex": text},
        lambda text: {"choice": ["a", text]},
        lambda text: {"grammar": text},
        lambda text: {"json": {"const": text}},
        lambda text: {"json": '{"const": "' + text + '"}'},
        lambda text: {"json": {"properties": {text: {}}}},
        lambda text: {"json": {}, "whitespace_pattern": text},
    ),
}
ARGUMENTS = {
    "request_id": [5, None, HALF, b"a", "a" + HALF, ["a"], object()],
    "prompt": [
        *HOSTILE,
        {"prompt": HALF},
        {"prompt": "a", HALF: 1},
        {"prompt_token_ids": [HALF]},
        {"prompt_token_ids": HALF},
    ],
    "cache_salt": [salt for salt in HOSTILE if salt is not None],
    "priority": [HALF, 2**63, -(2**64), 10**5000, 1.5, math.nan, "1", None, True, [1], object()],
    "arrival_time": [HALF, math.nan, math.inf, "now", [1], 1j, object(), True],
    "truncate_prompt_tokens": [HALF, 0, -2, 1.5, "1", [1], True, 10**5000],
    "add_special_tokens": [HALF, 1, "yes", [1], object()],
}


@pytest.fixture(scope="module")
def engine():
    return make_engine(scheduling_policy="priority")[0]


def serve(engine, request_id="hostile", prompt=(5, 6, 7, 8, 9), params=None, **options):
    """Queue a request beside an honest one, and serve both. Only a RequestError may come, and only from intake."""
    engine.abort_request(["honest", request_id] if isinstance(request_id, str) else ["honest"])
    engine.add_request("honest", [10, 11, 12, 13, 14], SamplingParams(temperature=0.0, max_tokens=9))
    error = None
    try:
        engine.add_request(request_id, prompt, params or SamplingParams(max_tokens=3), **options)
    except RequestError as refused:
        error = refused
    outputs = run_to_end(engine)
    assert outputs["honest"][-1].outputs[0].token_ids == list(range(15, 24))
    scheduler = engine._core._scheduler
    scheduler.check_integrity()
    assert not scheduler.requests
    return error


@pytest.mark.parametrize("field", FIELDS)
def test_a_sampling_parameter_of_any_kind_is_refused_by_its_name_or_served(engine, field):
    refusals = []
    for value in HOSTILE:
        try:
            params = SamplingParams(**{"max_tokens": 3, field: value})
        except RequestError as refused:
            refusals.append((field, refused.parameter))
        else:
            serve(engine, params=params)
    assert len(refusals) > 5
    assert set(refusals) <= {(field, field), *NAMED_TOGETHER}


# Fields that contradict each other are told by either.
NAMED_TOGETHER = {("max_tokens", "min_tokens"), ("min_tokens", "max_tokens"), ("logprob_token_ids", "logprobs")}


@pytest.mark.parametrize("field", FIELDS)
def test_a_sampling_parameter_that_was_set_behind_the_check_is_refused_at_intake(engine, field):
    for value in HOSTILE:
        params = SamplingParams(max_tokens=3)
        setattr(params, field, value)
        serve(engine, params=params)


@pytest.mark.parametrize("text", [HALF, "a\udcff", "\udfff\ud800"], ids=ascii)
@pytest.mark.parametrize("field", TAKES_TEXT)
def test_text_that_is_no_unicode_is_refused_by_the_field_that_holds_it(field, text):
    for place in TAKES_TEXT[field]:
        with pytest.raises(RequestError, match=f"^{field}.*surrogate") as caught:
            SamplingParams(**{field: place(text)})
        assert caught.value.parameter == field
        str(caught.value).encode()  # the refusal itself can be sent


@pytest.mark.parametrize("name", ARGUMENTS)
def test_everything_else_of_a_request_is_refused_by_its_name_or_served(engine, name):
    for value in ARGUMENTS[name]:
        if name in ("cache_salt", "priority"):  # of a dict
            given = {"prompt": {"prompt_token_ids": [5, 6, 7, 8, 9], name: value}}
        elif name in TOKENIZATION_KEYS:
            given = {"tokenization_kwargs": {name: value}}
        else:
            given = {name: value}
        error = serve(engine, **given)
        if isinstance(value, str) and not value.isascii() and value != "\U0010ffff":
            assert error is not None, (name, value)
        if error is not None:
            assert error.parameter == name, (name, value, error)
            str(error).encode()


@pytest.mark.parametrize("name", ["priority", "arrival_time"])
def test_numbers_that_order_requests_are_numbers(engine, name):
    for value in ARGUMENTS[name]:
        if value is not None:
            assert serve(engine, **{name: value}).parameter == name


@pytest.mark.parametrize("place", ["content", "role", "name"])
def test_a_chat_that_is_no_unicode_is_refused(engine, place):
    message = {"role": "user", "content": "the cat", place: "a" + HALF}
    chat = "{% for m in messages %}{{ m['role'] }}{{ m['name'] }}: {{ m['content'] }}{% endfor %}"
    with pytest.raises(RequestError, match="surrogate") as caught:
        engine.input_processor.chat_prompt([message], chat_template=chat)
    assert caught.value.parameter == "messages"
    with pytest.raises(RequestError):
        engine.input_processor.chat_prompt([{"role": "user", "content": "a"}], chat_template=chat + HALF)
