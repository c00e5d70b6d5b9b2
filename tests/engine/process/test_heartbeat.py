"""Whether work goes on is seen from outside, and patience ends when, and only when, it does not."""

import threading
import time

import pytest

from jaxpaged.engine.process.heartbeat import CALL, CALL_PATIENCE, LEAST_PATIENCE, STEP, WAITING, Heartbeat, Patience


def looks(patience, num):
    return [patience.exhausted() for _ in range(num)]


def test_what_one_writes_the_other_reads(tmp_path):
    mine, its = Heartbeat(tmp_path / "h"), Heartbeat(tmp_path / "h")
    assert its.look() == (0, WAITING)
    mine.beat()
    mine.beat()
    assert its.look() == (2, STEP)
    mine.tick()
    assert its.look() == (3, WAITING)


def test_a_step_that_stands_still_ends_patience_and_so_does_a_process_that_does_not_tick(tmp_path):
    heart = Heartbeat(tmp_path / "h")
    patience = Patience(heart, 3.0)
    num = round(3.0 / patience.interval)
    for sign in (heart.tick, heart.beat):
        for _ in range(3 * num):
            sign()
            assert not patience.exhausted(), "it goes on"
    assert looks(patience, num) == [False] * (num - 1) + [True]
    patience.renew()
    assert looks(patience, num) == [False] * (num - 1) + [True] and patience.silence == pytest.approx(3.0)
    for sign, limit in ((heart.tick, LEAST_PATIENCE), (lambda: heart.beat(CALL), CALL_PATIENCE)):
        sign()
        num = round(limit / patience.interval)
        assert looks(patience, num + 1) == [False] * num + [True]


def test_what_may_take_any_time_ticks_meanwhile(tmp_path):
    heart = Heartbeat(tmp_path / "h")
    heart.beat()
    with heart.ticking():
        first, doing = heart.look()
        assert doing == WAITING
        until(lambda: heart.look()[0] > first + 1)
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_the_heart_of_a_new_process_beats_in_the_same_file(tmp_path):
    watcher = Heartbeat(tmp_path / "h")
    Heartbeat(tmp_path / "h").beat()  # and dies in the middle of work
    Heartbeat(tmp_path / "h").tick()
    assert watcher.look() == (1, WAITING)
