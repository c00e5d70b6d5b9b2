"""Threads that nobody waits for longer than is said."""

import threading
import time

import pytest

from jaxpaged.kv_store.threads import NoAnswerError, Threads


def test_what_is_given_is_done_in_its_order_by_as_few_threads_as_do():
    threads, done = Threads(3, "some"), []
    for number in range(5):
        threads.submit(done.append, number).result(10)
        while threads._num_idle < len(threads._threads):  # a result is there before its thread asks for more
            time.sleep(0.001)
    assert done == [*range(5)] and len(threads._threads) == 1
    gate = threading.Barrier(3)
    for each in [threads.submit(gate.wait, 10) for _ in range(3)]:
        each.result(10)
    assert len(threads._threads) == 3
    for number in range(5, 9):
        threads.submit(done.append, number)
    assert threads.close(10) and done == [*range(9)]
    assert threads.submit(done.append, 9).cancelled()


def test_a_call_that_hangs_takes_as_long_as_it_may_and_others_go_on():
    threads, gate = Threads(2, "some"), threading.Event()
    begin = time.monotonic()
    with pytest.raises(NoAnswerError, match="within 0.05 s"):
        threads.call(0.05, gate.wait, 60)
    assert threads.call(10, lambda: 1) == 1
    with pytest.raises(NoAnswerError):
        threads.call(0.05, gate.wait, 60)
    called = []
    with pytest.raises(NoAnswerError):
        threads.call(0.05, called.append, 1)  # both threads hang
    assert not threads.close(0.05) and time.monotonic() - begin < 10
    gate.set()
    assert threads.close(10) and not called


@pytest.mark.parametrize("error", [ValueError("a"), TimeoutError("its own")])
def test_errors_are_those_of_the_call(error):
    threads = Threads(1, "some")

    def fail():
        raise error

    with pytest.raises(type(error)) as raised:
        threads.call(10, fail)
    assert raised.value is error
    assert threads.call(10, lambda: 2) == 2


def test_closing_can_cancel_what_nobody_has_begun():
    threads, gate, done = Threads(1, "some"), threading.Event(), []
    first = threads.submit(gate.wait, 60)
    second = threads.submit(done.append, 1)
    assert not threads.close(0.01, cancels=True)
    gate.set()
    assert first.result(10) and second.cancelled() and threads.close(10) and not done


def test_at_the_end_of_a_program_no_thread_can_start_and_all_is_done_nevertheless(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    one, none = Threads(2, "some"), Threads(2, "some")
    gate = threading.Event()
    one.submit(gate.wait, 60)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    later = one.submit(lambda: 1)
    assert none.call(10, lambda: 2) == 2 and none.close(1)
    gate.set()
    assert later.result(10) == 1 and one.close(10)
