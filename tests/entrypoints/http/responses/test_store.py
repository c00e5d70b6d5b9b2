"""The store's bounds, which hold after everything that can happen to it."""

import pytest

from jaxpaged.entrypoints.http.responses.protocol import Response
from jaxpaged.entrypoints.http.responses.store import ResponseStore, StoredResponse
from jaxpaged.serving.errors import ErrorKind, ServingError

ME, YOU = b"me", b"you"


def stored(number, size=0, running=False):
    response = Response(id=f"resp_{number}", created_at=0, model="m", status="completed", instructions="x" * size)
    made = StoredResponse(response, ME, [])
    made.is_running = running
    return made


def kept(store, count):
    """Numbers of responses that are there."""
    numbers = []
    for number in range(count):
        try:
            store.get(f"resp_{number}", ME)
        except ServingError:
            continue
        numbers.append(number)
    return numbers


def test_the_oldest_go_first_when_there_are_too_many():
    store = ResponseStore(3, 10**6)
    for number in range(5):
        store.put(stored(number))
    assert kept(store, 5) == [2, 3, 4] and len(store) == 3


def test_the_oldest_go_first_when_there_are_too_many_bytes():
    store = ResponseStore(100, 10_000)
    for number in range(5):
        store.put(stored(number, 3000))
    assert kept(store, 5) == [3, 4] and store.num_bytes <= 10_000


def test_one_that_is_larger_than_all_there_is_goes_at_once():
    store = ResponseStore(100, 1000)
    store.put(stored(0, 5000))
    assert kept(store, 1) == [] and store.num_bytes == 0


def test_running_ones_stay_and_refuse_others_when_there_is_no_room():
    store = ResponseStore(2, 10**6)
    running = [stored(number, running=True) for number in range(2)]
    for each in running:
        store.check_room()
        store.put(each)
    with pytest.raises(ServingError) as full:
        store.check_room()
    store.put(stored(2))
    assert full.value.kind is ErrorKind.TOO_MANY and kept(store, 3) == [0, 1]
    running[0].is_running = False
    store.put(stored(3))
    assert kept(store, 4) == [1, 3]


def test_one_that_is_kept_again_is_measured_again():
    store = ResponseStore(2, 10**6)
    one = stored(0)
    store.put(one)
    before = store.num_bytes
    one.add_events([b"x" * 100])
    store.put(one)
    assert store.num_bytes == before + 100
    store.remove(one)
    store.remove(one)
    assert store.num_bytes == 0 and len(store) == 0


def test_only_the_owner_hears_that_something_was_dropped():
    store = ResponseStore(1, 10**6)
    store.put(stored(0))
    store.put(stored(1))
    for owner, told in ((ME, "dropped"), (YOU, "not known")):
        with pytest.raises(ServingError, match=told) as gone:
            store.get("resp_0", owner)
        assert gone.value.kind is ErrorKind.NOT_FOUND
