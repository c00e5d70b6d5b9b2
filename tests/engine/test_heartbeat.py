"""Whether work goes on is seen from outside, and patience ends when, and only when, it does not."""

from jaxpaged.engine.heartbeat import Heartbeat, Patience


def looks(patience, num):
    return [patience.exhausted() for _ in range(num)]


def test_what_one_writes_the_other_reads(tmp_path):
    mine, its = Heartbeat(tmp_path / "h"), Heartbeat(tmp_path / "h")
    assert its.look() == (0, False)
    mine.beat()
    mine.beat()
    assert its.look() == (2, True)
    mine.rest()
    assert its.look() == (2, False)


def test_only_work_that_stands_still_ends_patience(tmp_path):
    heart = Heartbeat(tmp_path / "h")
    patience = Patience(heart, 3.0)
    num = round(3.0 / patience.interval)
    assert not any(looks(patience, 3 * num)), "nothing is to be done"
    for _ in range(3 * num):
        heart.beat()
        assert not patience.exhausted(), "work goes on"
    assert looks(patience, num) == [False] * (num - 1) + [True]
    patience.renew()
    assert looks(patience, num) == [False] * (num - 1) + [True]
    heart.rest()
    assert not any(looks(patience, 3 * num))


def test_the_heart_of_a_new_process_beats_in_the_same_file(tmp_path):
    watcher = Heartbeat(tmp_path / "h")
    Heartbeat(tmp_path / "h").beat()  # and dies in the middle of work
    Heartbeat(tmp_path / "h").rest()
    assert watcher.look() == (0, False)
