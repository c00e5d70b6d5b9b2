"""What processes of one engine say to each other, and what becomes of a group that loses one; nobody computes here."""

import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxpaged.engine.process.follower_process import free_port
from jaxpaged.errors import CapacityError, ConfigError, EngineDeadError
from jaxpaged.executor import follower as follower_module
from jaxpaged.executor import group as group_module
from jaxpaged.executor.follower import Post, follow
from jaxpaged.executor.group import Alive, Ask, Broken, Draw, Group, Hello, Reply, Stop, Want
from jaxpaged.executor.multiproc import ReadyEverywhere
from jaxpaged.messages import ProgramKey

SECRET = b"of these tests"
GIVEN = {"jax": "1", "model": "'demo'"}


class Members:
    """A group of three in this process: two of them only talk."""

    def __init__(self, **options):
        self.ended = threading.Event()
        self.heard = []
        tell = lambda *progress: self.heard.append(progress)
        self.group = Group(3, "127.0.0.1", None, SECRET, tell, last_resort=lambda error: self.ended.set())
        self.posts = [Post(rank, self.group.addresses, SECRET) for rank in (1, 2)]

    def arrive(self, **others):
        for post in self.posts:
            post.say(Hello(post.rank, f"process {post.rank} of here", {**GIVEN, **others}))
        self.group.gather(GIVEN, 20)

    def close(self):
        self.group.close()
        for post in self.posts:
            post.close()


@pytest.fixture
def members():
    made = Members()
    yield made
    made.close()


def hear(post):
    return post.hear(20)


def in_thread(function, *args):
    """Call a function in a thread -> what waits for it and gives what it gave, or raises what it raised."""
    results = []

    def run():
        try:
            results.append((function(*args), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(20)
        [(value, error)] = results
        if error is not None:
            raise error
        return value

    return result


def test_all_settle_for_the_fewest_blocks(members):
    members.arrive()
    settled = [in_thread(post.settle_blocks, 30 + post.rank, 20) for post in members.posts]
    assert members.group.settle_blocks(40) == 31
    assert [result() for result in settled] == [31, 31]


def test_what_is_told_comes_to_all_in_order(members):
    members.arrive()
    masks = np.arange(6, dtype=np.uint32).reshape(2, 3)
    members.group.tell(Draw(masks))
    members.group.want(ProgramKey("forward", 8), hurry=True)
    members.group.want(ProgramKey("forward", 8), hurry=True)  # they know
    members.group.close()
    for post in members.posts:
        np.testing.assert_array_equal(hear(post).masks_NW, masks)
        assert hear(post) == Want(ProgramKey("forward", 8), True)
        assert hear(post) == Stop()


def test_a_question_is_answered_by_all_before_it_is_over(members):
    members.arrive()
    calls = []
    asked = in_thread(members.group.ask, "sleep", [True], lambda: calls.append("own"))
    for post in members.posts:
        question = hear(post)
        assert (question.method, question.arguments) == ("sleep", [True])
        post.say(Reply(post.rank, question.call_id))
    asked()
    assert calls == ["own"]


def test_what_a_question_raises_elsewhere_is_raised_here(members):
    members.arrive()
    asked = in_thread(members.group.ask, "wake_up", ["weights"], lambda: None)
    for post in members.posts:
        question = hear(post)
        assert isinstance(question, Ask)
        error = ("CapacityError", "no memory") if post.rank == 2 else None
        post.say(Reply(post.rank, question.call_id, error))
    with pytest.raises(CapacityError, match="no memory"):
        asked()


def test_who_does_not_come_is_named():
    members = Members()
    [first, _] = members.posts
    first.say(Hello(1, "here", GIVEN))
    try:
        with pytest.raises(EngineDeadError, match=r"rank 2 of 3 did not arrive within 0\.5 s"):
            members.group.gather(GIVEN, 0.5)
    finally:
        members.close()


def test_a_stranger_is_never_heard(members):
    stranger = Post(1, members.group.addresses, b"another secret")
    stranger.say(Hello(1, "elsewhere", GIVEN))
    with pytest.raises(EngineDeadError, match="rank 1, 2 of 3 did not arrive"):
        members.group.gather(GIVEN, 0.5)
    stranger.close()
    members.arrive()  # and is in nobody's way


@pytest.mark.parametrize(
    ("other", "words"), [({"jax": "2"}, "has jax 2, and rank 0 has 1"), ({"more": "x"}, "has more x, .* missing")]
)
def test_what_must_be_the_same_and_is_not_is_named(members, other, words):
    with pytest.raises(ConfigError, match=words):
        members.arrive(**other)


def test_who_breaks_down_ends_the_group_and_says_why(members):
    members.arrive()
    members.posts[1].say(Broken(2, "CapacityError", "there is no memory for the weights"))
    with pytest.raises(CapacityError, match=r"rank 2 \(process 2 of here\): there is no memory"):
        members.group.settle_blocks(40)  # it would wait for ever
    with pytest.raises(EngineDeadError, match="there is no memory"):
        members.group.tell(Stop())


def test_a_driver_that_waits_for_a_device_is_ended(members, monkeypatch):
    monkeypatch.setattr(group_module, "GRACE_SECONDS", 0.05)
    members.arrive()
    members.group.fail(EngineDeadError("rank 1: killed"))
    assert members.ended.wait(20)


def test_who_is_silent_is_lost(members, monkeypatch):
    members.arrive()
    monkeypatch.setattr(group_module, "SILENCE_SECONDS", 0.1)
    with pytest.raises(
        EngineDeadError, match=r"rank [12] \(process [12] of here\) has given no sign of life for 0\.1 "
    ):
        members.group.settle_blocks(40)


def test_who_waits_for_a_late_host_is_not_silent(members, monkeypatch):
    monkeypatch.setattr(group_module, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(follower_module, "ALIVE_SECONDS", 0.1)
    early, late = members.posts
    nothing = lambda config: pytest.fail("it was not welcomed")
    following = in_thread(follow, early, "process 1 of here", GIVEN, nothing)
    threading.Timer(2.0, late.say, [Hello(2, "process 2 of here", GIVEN)]).start()
    members.group.gather(GIVEN, 20)
    members.group.check()
    members.group.close()
    with pytest.raises(EngineDeadError, match="rank 1 waited .* and Stop came"):
        following()


JOINING = """
import sys
from jaxpaged.executor import follower, group
follower.JOIN_SECONDS = group.JOIN_SECONDS = 2.0
secret, given = b"of these tests", {"jax": "1"}
if sys.argv[1] == "driver":
    made = group.Group(2, "127.0.0.1", None, secret, print, last_resort=lambda error: group.end_process())
    post = follower.Post(1, made.addresses, secret)
    post.say(group.Hello(1, "process 1 of here", given))
    signs = follower.SignsOfLife(post)
    group.GRACE_SECONDS = 0.1
    made.gather(given, 20)
    made.join({}, "127.0.0.1:" + sys.argv[2], one_device=True)
else:
    from jaxpaged.distributed.group import Membership
    made = group.Group(2, "127.0.0.1", None, secret, print, last_resort=lambda error: None)
    post = follower.Post(1, made.addresses, secret)
    import threading
    threading.Thread(target=follower.follow, args=(post, "process 1 of here", given, None), daemon=True).start()
    made.gather(given, 20)
    made._send(1, group.Welcome({}, Membership("127.0.0.1:" + sys.argv[2], 2, 1, True)))
    threading.Event().wait()
"""


@pytest.mark.parametrize("role", ["driver", "follower"])
def test_who_waits_in_vain_for_others_to_join_says_so_and_ends(role):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody answers there
        port = str(unused.getsockname()[1] if role == "follower" else free_port())
        command = [sys.executable, "-c", JOINING, role, port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rank = 0 if role == "driver" else 1
    assert f"process {rank} of 2 waited 2 s for all others to join at 127.0.0.1:{port}" in ended.stderr
    assert ended.returncode == 1, "it was not jax that ended it"


class Own:
    """The programs of this process: all of them are ready."""

    def is_ready(self, key):
        return True

    prepare = is_ready

    def smallest_ready(self, kind, size, buckets):
        return next(bucket for bucket in buckets if bucket >= size)

    def largest_usable(self, kind, buckets):
        return buckets[-1]


def test_a_program_is_ready_when_all_have_it(members):
    members.arrive()
    programs = ReadyEverywhere(Own(), members.group)
    small, large = ProgramKey("forward", 8), ProgramKey("forward", 32)
    assert not programs.is_ready(small)
    assert programs.smallest_ready("forward", 5, (8, 16, 32)) == 8  # nobody has any: the step waits for the right one
    for post in members.posts:
        assert hear(post) == Want(small, False)
        post.say(Alive(post.rank, [large, small] if post.rank == 1 else [large]))
    members.group._wait(lambda: members.group.is_ready(large), 20)
    assert programs.smallest_ready("forward", 5, (8, 16, 32)) == 32
    assert programs.largest_usable("forward", (8, 16)) == 16 and programs.largest_usable("forward", (8, 16, 32)) == 32
    assert not programs.prepare(small)
    members.posts[1].say(Alive(2, [small]))
    members.group._wait(lambda: members.group.is_ready(small), 20)
    assert programs.is_ready(small)
    assert programs.smallest_ready("forward", 5, (8, 16, 32)) == 8
    assert members.heard  # whoever watches the core knows that it lives
