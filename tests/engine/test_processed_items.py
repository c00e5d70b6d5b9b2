"""Pixels that a core keeps, and requests that wait for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.processed_items import PixelDesk, ProcessedItems
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.core.simulation import illustrated, prompt_of


def pixels_of(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


def request_of(request_id: str, *names: str) -> EngineCoreRequest:
    """One with pictures of these names, without pixels."""
    tokens, features = illustrated(prompt_of(4), *[(2, name, (3,)) for name in names])
    for feature in features:
        feature.pixels = None
    return EngineCoreRequest(request_id, tokens, SamplingParams(max_tokens=2, seed=0), 0.0, mm_features=features)


def key_of(name: str) -> bytes:
    return request_of("", name).mm_features[0].key


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=60), st.integers(0, 12))
def test_what_was_wanted_last_stays_within_the_capacity(uses, capacity):
    items, model = ProcessedItems(capacity), []  # of keys, the newest last
    for name, is_put in uses:
        size = 1 + ord(name) % 5
        if is_put:
            items.put(name.encode(), pixels_of(size))
            if name not in model and size <= capacity:
                model.append(name)
        else:
            assert (items.get(name.encode()) is not None) == (name in model)
            model.sort(key=lambda each, name=name: each == name)
        while sum(1 + ord(each) % 5 for each in model) > capacity:
            del model[0]
        assert items.num_bytes == sum(1 + ord(each) % 5 for each in model)
    assert items.queries == sum(not is_put for _, is_put in uses)


def test_a_request_waits_until_it_has_all_pixels():
    desk, request, other = PixelDesk(), request_of("r", "x", "y", "x"), request_of("s", "x")
    assert not desk.take(request) and not desk.take(other)
    assert desk.lacking("r") == [key_of("x"), key_of("y")] and set(desk.waiting) == {"r", "s"}
    assert desk.bring(key_of("z"), pixels_of(1)) == []
    came = pixels_of(2)
    assert desk.bring(key_of("x"), came) == [other] and other.mm_features[0].pixels is came
    assert desk.lacking("r") == [key_of("y")] and desk.lacking("s") == []
    assert desk.bring(key_of("y"), came) == [request] and not desk.waiting


def test_pixels_that_came_serve_later_requests_if_they_are_kept():
    desk, first = PixelDesk(), request_of("r", "x")
    first.mm_features[0].pixels = pixels_of(3)
    assert desk.take(first) and not desk.take(request_of("s", "x")), "nothing is kept in one process"
    assert desk.remove(["s", "t"]) == ["s"] and not desk.waiting
    desk.items.capacity = 5
    assert desk.take(first) and desk.take(request_of("t", "x"))
    desk.bring(key_of("y"), pixels_of(4))
    assert not desk.take(request_of("u", "x")) and desk.take(request_of("v", "y"))


@pytest.mark.parametrize("capacity", [0, 2])
def test_more_than_the_capacity_serves_who_waits(capacity):
    desk = PixelDesk()
    desk.items.capacity = capacity
    request = request_of("r", "x")
    assert not desk.take(request) and desk.bring(key_of("x"), pixels_of(9)) == [request]
    assert desk.items.num_bytes == 0
