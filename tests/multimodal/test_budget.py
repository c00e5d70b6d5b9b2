"""Bytes in flight: in order, never more than there are, counted as long as an array lives, and evicted from a cache."""

import threading
import time

import numpy as np
import pytest

from jaxpaged.errors import EngineDeadError, RequestError
from jaxpaged.multimodal.budget import ByteBudget


def test_an_array_counts_until_its_last_view_is_gone():
    budget = ByteBudget(100)
    array = np.zeros(40, np.uint8)
    budget.hold(array)
    view = array[3:]
    del array
    assert budget.used == 40
    del view
    assert budget.used == 0


def test_what_is_larger_than_everything_is_refused_with_the_numbers():
    with pytest.raises(RequestError, match=r"^image needs up to 101 bytes .* 100 \(mm_bytes_in_flight_gb\)") as caught:
        ByteBudget(100).reserve(101, "image")
    assert caught.value.parameter == "image"


def test_callers_wait_in_the_order_in_which_they_come():
    budget, order = ByteBudget(100), []
    first = budget.reserve(80, "a")

    def want(number, num_bytes):
        with budget.reserve(num_bytes, "b"):
            order.append(number)

    threads = []
    for number, num_bytes in enumerate((90, 10, 10)):  # the small ones would fit at once
        threads.append(threading.Thread(target=want, args=(number, num_bytes)))
        threads[-1].start()
        while budget.num_waiting <= number:
            time.sleep(0.001)
    assert order == []
    first.give_back(80)
    for thread in threads:
        thread.join(10)
    assert order[0] == 0 and sorted(order) == [0, 1, 2]
    assert budget.used == 0 and budget.num_waiting == 0


def test_what_is_only_cached_goes_first():
    cached = [np.zeros(30, np.uint8) for _ in range(3)]
    budget = ByteBudget(100, lambda num_bytes: [cached.pop() for _ in range(-(-num_bytes // 30)) if cached] and None)
    for array in cached:
        budget.hold(array)
    del array
    with budget.reserve(50, "a"):
        assert len(cached) == 1 and budget.used == 80
    assert budget.used == 30


def test_who_frees_memory_himself_is_asked_in_place_of_waiting():
    budget = ByteBudget(100)
    held = [budget.reserve(30, "a") for _ in range(3)]

    def make_room():
        if held:
            held.pop().give_back(30)
            return True
        return False

    budget.reserve(80, "b", make_room).give_back(80)
    assert not held
    budget.reserve(60, "c")
    with pytest.raises(RequestError, match="60 are in use"):
        budget.reserve(50, "d", make_room)
    assert budget.num_waiting == 0


def test_nobody_waits_for_an_engine_that_has_gone():
    budget, found = ByteBudget(100), []
    budget.reserve(100, "a")

    def want():
        try:
            budget.reserve(1, "b")
        except EngineDeadError as error:
            found.append(error)

    thread = threading.Thread(target=want)
    thread.start()
    while not budget.num_waiting:
        time.sleep(0.001)
    budget.close()
    thread.join(10)
    assert len(found) == 1
