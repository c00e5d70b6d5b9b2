"""Both queues against a sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.core.request import Request
from jaxpaged.core.request_queue import FCFSQueue, PriorityQueue, ShortFirst
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams


def make_request(order: int, priority: int = 0, arrival_time: float = 0.0) -> Request:
    message = EngineCoreRequest(f"r{order}", [1], SamplingParams(), arrival_time, priority=priority)
    return Request(message, max_model_len=100, arrival_order=order, num_groups=1)


def drain(queue) -> list[str]:
    requests = list(queue)
    for request in requests:
        queue.remove(request)
    return [request.request_id for request in requests]


def test_first_come_is_first_served():
    queue = FCFSQueue()
    for order in range(4):
        queue.add(make_request(order, priority=-order))
    assert drain(queue) == ["r0", "r1", "r2", "r3"]


def test_preempted_requests_go_to_the_front_in_their_old_order():
    queue = FCFSQueue()
    queue.add(make_request(2))
    for order in (1, 0):  # the youngest is preempted first
        queue.add_preempted(make_request(order))
    assert drain(queue) == ["r0", "r1", "r2"]


def test_priority_comes_before_arrival_time_and_that_before_order():
    queue = PriorityQueue()
    for order, (priority, arrival_time) in enumerate([(1, 0.0), (0, 9.0), (0, 2.0), (0, 2.0), (-1, 5.0)]):
        queue.add(make_request(order, priority, arrival_time))
    assert drain(queue) == ["r4", "r2", "r3", "r1", "r0"]


def test_a_preempted_request_takes_its_place_by_priority_again():
    queue = PriorityQueue()
    requests = [make_request(order) for order in range(3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.add_preempted(requests[0])
    assert drain(queue) == ["r0", "r1", "r2"]


@pytest.mark.parametrize("kind", [FCFSQueue, PriorityQueue, lambda: ShortFirst(FCFSQueue(), 2, 8)])
@given(st.lists(st.tuples(st.sampled_from("aaapr"), st.integers(0, 2), st.integers(0, 100)), max_size=60))
def test_a_queue_behaves_like_a_sorted_list(kind, actions):
    queue, model = kind(), []
    for order, (action, priority, pick) in enumerate(actions):
        if action in "ap":
            request = make_request(order, priority)
            if action == "a":
                queue.add(request)
                model.append(request)
            else:
                queue.add_preempted(request)
                model.insert(0, request)
            if kind is PriorityQueue:
                model.sort(key=lambda r: (r.priority, r.arrival_order))
        elif model and action == "r":
            queue.remove(model.pop(pick % len(model)))
        assert len(queue) == len(model)
        assert list(queue) == model
        assert bool(queue) == bool(model)
    assert drain(queue) == [request.request_id for request in model]
