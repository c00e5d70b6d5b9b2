"""Nothing that processes of one engine wait for is waited for without end."""

import threading
import time

import pytest
import zmq

from jaxpaged.distributed import channel
from jaxpaged.errors import EngineDeadError
from jaxpaged.executor import group as group_module
from jaxpaged.executor.follower import Post
from jaxpaged.executor.group_messages import Alive, Loaded, Reply, Sized
from jaxpaged.messages import ProgramKey
from tests.executor.members import SECRET, Members, hear, in_thread

KEY = ProgramKey("forward", 8)


@pytest.mark.parametrize(
    ("wait", "answer", "what"),
    [
        (lambda group: group.settle_blocks(40), lambda call: Sized(1, 30), "say how many KV blocks fit"),
        (lambda group: group.wait_until_loaded(), lambda call: Loaded(1), "load"),
        (lambda group: group.ask("wake_up", ["weights"], list), lambda call: Reply(1, call.call_id), "end wake_up"),
        (lambda group: group.wait_until_ready([KEY]), lambda call: Alive(1, [KEY]), "compile the program forward 8"),
    ],
)
def test_who_lives_and_never_does_what_the_others_wait_for_is_named_and_ends_the_group(
    members, monkeypatch, wait, answer, what
):
    monkeypatch.setattr(group_module, "WORK_SECONDS", 0.5)
    monkeypatch.setattr(group_module, "ASK_AGAIN_SECONDS", 0.1)
    members.arrive()
    waiting = in_thread(wait, members.group)
    first = members.posts[0]
    first.say(answer(hear(first) if what.startswith(("end", "compile")) else None))
    with pytest.raises(EngineDeadError, match=rf"^rank 2 \(process 2 of here\) did not {what} within 0\.5 s, though"):
        waiting()
    with pytest.raises(EngineDeadError, match="did not"):
        members.group.check()


def test_a_thread_that_never_ends_keeps_nobody_from_closing(monkeypatch, caplog):
    monkeypatch.setattr(group_module, "CLOSE_SECONDS", 0.1)
    members, stuck, go_on, released = Members(), threading.Event(), threading.Event(), []
    members.arrive()
    members.group._release = lambda: released.append("what was borrowed")
    monkeypatch.setattr(members.group, "_look_for_silent", lambda: (stuck.set(), go_on.wait(20)))
    assert stuck.wait(20)
    in_thread(members.close)()
    assert released == ["what was borrowed"]
    assert "did not end within 0.1 s" in caplog.text
    go_on.set()
    members.group._thread.join(20)
    members.group._end.close()


def test_who_says_that_it_lives_does_not_wait_for_a_driver_that_never_comes():
    post = Post(1, ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9"), SECRET)
    in_thread(lambda: [post.say(Alive(1, [])) for _ in range(3000)])()  # zmq's own limit is 1000
    before = time.monotonic()
    in_thread(post.close)()
    assert time.monotonic() - before < 10, "what can never leave is waited for"


def test_who_has_seen_the_driver_leave_can_close(members):
    members.arrive()
    first = members.posts[0]
    watching = in_thread(first.wait_until_lost)
    first.say(Alive(1, []))
    in_thread(members.group.close)()
    watching()
    before = time.monotonic()
    in_thread(first.close)()
    assert time.monotonic() - before < 5, "its own socket is waited for"


def test_a_socket_that_stays_open_keeps_nobody_from_closing(monkeypatch):
    monkeypatch.setattr(channel, "CLOSE_SECONDS", 0.1)
    post = Post(1, ("tcp://127.0.0.1:9", "tcp://127.0.0.1:9"), SECRET)
    left = post._end._context.socket(zmq.PUSH)
    in_thread(post.close)()
    left.close()
