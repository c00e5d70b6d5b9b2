"""What processes of one engine say to each other, and what becomes of a group that loses one; nobody computes here."""

import contextlib
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxpaged.engine.process.gathering import free_port
from jaxpaged.errors import CapacityError, CheckpointError, ConfigError, EngineDeadError, EngineError
from jaxpaged.executor import follower as follower_module
from jaxpaged.executor import group as group_module
from jaxpaged.executor.follower import Follower, Post, follow
from jaxpaged.executor.group_messages import (
    Alive,
    Ask,
    Broken,
    DropLoRA,
    Hello,
    Loaded,
    Reply,
    Sample,
    Stop,
    Want,
    Welcome,
)
from jaxpaged.executor.multiproc import Everybody, GroupStep, ReadyEverywhere
from jaxpaged.messages import LoRAInfo, LoRARequest, ProgramKey
from tests.executor.members import GIVEN, SECRET, Members, hear, in_thread, wait_for


def test_all_settle_for_the_fewest_blocks(members):
    members.arrive()
    settled = [in_thread(post.settle_blocks, 30 + post.rank, 20) for post in members.posts]
    assert members.group.settle_blocks(40) == 31
    assert [result() for result in settled] == [31, 31]


def test_what_is_told_comes_to_all_in_order(members):
    members.arrive()
    masks = np.arange(6, dtype=np.uint32).reshape(2, 3)
    members.group.tell(Sample(masks))
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


def test_a_question_may_ask_for_results(members):
    members.arrive()
    asked = in_thread(lambda: members.group.ask("call_extension", ["norm", [], {}], lambda: 1.5, returns=True))
    for post in members.posts:
        question = hear(post)
        assert question.returns
        post.say(Reply(post.rank, question.call_id, result={"rank": post.rank}))
    assert asked() == [1.5, {"rank": 1}, {"rank": 2}]


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


class Receiver:
    """A worker that receives weights once an adapter is dropped: both in one thread would wait for ever."""

    def __init__(self, sums):
        self.sums, self.num_taken_back, self.has_dropped = sums, 0, threading.Event()
        self.start_profile = self.stop_profile = None

    def receive_weights(self, weights, mapping):
        assert (weights, mapping) == (["/w"], None) and self.has_dropped.wait(20)
        return 7

    def sums_of_weights(self):
        return self.sums

    def take_weights_back(self):
        self.num_taken_back += 1
        return 0

    def drop_lora(self, lora_int_id):
        self.has_dropped.set()


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"a": 1, "b": 2}, None),
        ({"a": 1, "b": 3}, r"^rank 2 .* has read other weights than rank 0: 1 tensors differ, the first is b\. Copy"),
        ({"b": 2}, "1 tensors differ, the first is a"),
    ],
)
def test_all_receive_the_same_weights_beside_what_else_they_do_or_none_has_them(members, theirs, words):
    members.arrive()
    workers = [Receiver({"a": 1, "b": 2}), Receiver({"a": 1, "b": 2}), Receiver(theirs)]
    for post, worker in zip(members.posts, workers[1:]):
        in_thread(Follower(post, SimpleNamespace(worker=worker)).run)
    everybody = Everybody(workers[0], members.group)
    receiving = in_thread(everybody.receive_weights, ["/w"], None)
    everybody.drop_lora(2)
    if words is None:
        assert receiving() == 7
    else:
        with pytest.raises(CheckpointError, match=words):
            receiving()
    assert [each.num_taken_back for each in workers] == [int(words is not None)] * 3
    members.group.close()


class Reader:
    """A worker that reads adapters once others are dropped: both in one thread would wait for ever."""

    def __init__(self):
        self.dropped, self.has_dropped = [], threading.Event()
        self.start_profile = self.stop_profile = None

    def read_lora(self, request):
        assert self.has_dropped.wait(20)
        return LoRAInfo(request.lora_name, request.lora_int_id, request.lora_path, "abc")

    def drop_lora(self, lora_int_id):
        self.dropped.append(lora_int_id)
        self.has_dropped.set()


@pytest.mark.parametrize(
    ("error", "digest", "words"),
    [
        (None, "abc", None),
        (None, "def", r"^/a: the files .* digest abc where rank 0 .* and def at rank 2 \(process 2 of here\)\. Copy"),
        (("CheckpointError", "/a is empty"), None, r"^rank 2 \(process 2 of here\): /a is empty"),
    ],
)
def test_all_read_an_adapter_beside_what_else_they_do_or_none_has_it(members, error, digest, words):
    members.arrive()
    [first, second], [own, other] = members.posts, [Reader(), Reader()]
    following = in_thread(Follower(first, SimpleNamespace(worker=other)).run)
    everybody = Everybody(own, members.group)
    reading = in_thread(everybody.read_lora, LoRARequest("a", 3, "/a"))
    question = hear(second)
    everybody.drop_lora(2)
    assert hear(second) == DropLoRA(2)
    second.say(Reply(2, question.call_id, error, digest))
    if words is None:
        assert reading() == LoRAInfo("a", 3, "/a", "abc")
    else:
        with pytest.raises(CheckpointError, match=words):
            reading()
        assert hear(second) == DropLoRA(3)
    members.group.close()
    following()
    assert own.dropped == other.dropped == ([2] if words is None else [2, 3])


def test_who_reads_an_adapter_when_the_engine_ends_waits_for_nobody(members):
    members.arrive()
    reading = in_thread(members.group.read_lora, LoRARequest("a", 3, "/a"), lambda: LoRAInfo("a", 3, "/a", "abc"))
    hear(members.posts[0])
    members.group.close()
    with pytest.raises(EngineDeadError, match="the engine has ended"):
        reading()


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_hears_nobody_any_more_ends_the_group(members, monkeypatch):
    members.arrive()
    monkeypatch.setattr(members.group, "_look_for_silent", lambda: 1 / 0)
    with pytest.raises(EngineDeadError, match="hears the other processes broke down: ZeroDivisionError"):
        members.group.settle_blocks(40)  # it would wait for ever


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
    following = in_thread(follow, early, "process 1 of here", GIVEN, nothing, 20.0)
    threading.Timer(2.0, late.say, [Hello(2, "process 2 of here", GIVEN)]).start()
    members.group.gather(GIVEN, 20)
    members.group.check()
    members.group.close()
    with pytest.raises(EngineDeadError, match="rank 0 has ended: it was told to"):
        following()


def test_what_ended_the_engine_is_told_to_those_who_have_come(members):
    first = members.posts[0]
    for post in members.posts:
        post.say(Hello(post.rank, "here", {**GIVEN, "jax": "2"} if post.rank == 2 else GIVEN))
    with pytest.raises(ConfigError, match="rank 2 .* has jax 2") as refused:
        members.group.gather(GIVEN, 20)
    members.group.close(str(refused.value))
    with pytest.raises(EngineDeadError, match=r"rank 0 has ended: rank 2 \(here\) has jax 2, and rank 0 has 1"):
        first.expect(Welcome, 20)


def test_who_waits_for_rank_0_in_vain_says_where_it_looked(members):
    post = members.posts[0]
    with pytest.raises(EngineDeadError, match=rf"waited 0\.1 s for rank 0 at {members.group.addresses[0]} and tcp://"):
        post.expect(Welcome, 0.1)


@contextlib.contextmanager
def another(members, rank):
    """A further process that says that it is `rank`."""
    post = Post(rank, members.group.addresses, SECRET)
    try:
        yield post
    finally:
        post.close()


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (3, "process 9 of there says that it is rank 3, but there are 3 processes, of ranks 0 to 2. Give all hosts"),
        (1, r"two say that they are rank 1: process 1 of here, and process 9 of there\. Give each host a node_rank"),
    ],
)
def test_a_host_that_has_the_rank_of_another_or_none_ends_the_start_and_no_engine(members, caplog, rank, words):
    members.posts[0].say(Hello(1, "process 1 of here", GIVEN))
    wait_for(lambda: 1 in members.group._hellos)
    with another(members, rank) as post:
        post.say(Hello(rank, "process 9 of there", GIVEN))
        with pytest.raises(ConfigError, match=words):
            members.group.gather(GIVEN, 20)
    members.close()
    members.__init__()
    members.arrive()
    with another(members, rank) as post:
        post.say(Hello(rank, "process 9 of there", GIVEN))
        post.say(Broken(rank, "EngineError", "of no concern"))
        post.say(Alive(rank, [ProgramKey("forward", 8)]))
        members.posts[0].say(Alive(1, [ProgramKey("forward", 16)]))
        wait_for(lambda: "process 9 of there" in caplog.text)
        wait_for(lambda: members.group._ready[1])
    members.group.check()
    assert members.group._ready[1] == {ProgramKey("forward", 16)}, "another process said what it has"


def test_who_starts_again_before_all_have_come_is_taken_and_later_ends_the_group(members):
    first = members.posts[0]
    first.say(Hello(1, "process 1 of here", GIVEN))
    wait_for(lambda: 1 in members.group._hellos)
    first.close()
    members.posts[0] = Post(1, members.group.addresses, SECRET)
    members.posts[0].say(Hello(1, "process 3 of here", GIVEN))
    wait_for(lambda: members.group._hellos[1].where == "process 3 of here")
    members.posts[1].say(Hello(2, "process 2 of here", GIVEN))
    members.group.gather(GIVEN, 20)
    with another(members, 1) as post:
        post.say(Hello(1, "process 4 of here", GIVEN))
        with pytest.raises(EngineDeadError, match=r"rank 1 \(.*\) has ended, and process 4 of here came in its place"):
            members.group.settle_blocks(40)


def test_what_a_process_of_a_group_before_says_is_not_heard(members):
    with another(members, 1) as late:
        late.say(Broken(1, "EngineError", "the driver is gone"))
        late.say(Alive(1, [ProgramKey("forward", 8)]))
        members.arrive()
        late.say(Broken(1, "EngineError", "the driver is gone"))
        members.posts[0].say(Alive(1, [ProgramKey("forward", 16)]))
        wait_for(lambda: members.group._ready[1])
    members.group.check()
    assert members.group._ready[1] == {ProgramKey("forward", 16)}


def test_words_that_cannot_be_read_end_the_start_and_no_engine(members, caplog):
    members.posts[0]._end.send([b"process", b"\x93\xa5Hello"])
    with pytest.raises(ConfigError, match=r"says what this one cannot read .* the same version"):
        members.group.gather(GIVEN, 20)
    members.close()
    members.__init__()
    members.arrive()
    members.posts[0]._end.send([b"process", b"\x93\xa5Hello"])
    wait_for(lambda: "cannot read" in caplog.text)
    members.posts[0].say(Broken(1, "EngineError", "this is heard"))
    with pytest.raises(EngineError, match="this is heard"):
        members.group.settle_blocks(40)


def test_all_have_loaded_before_any_step_and_have_its_programs(members):
    members.arrive()
    loaded = in_thread(members.group.wait_until_loaded)
    keys = [ProgramKey("forward", 8), ProgramKey("sample", 8)]
    for post in members.posts:
        assert not members.group._loaded.issuperset({1, 2})
        post.say(Loaded(post.rank))
    loaded()
    ready = in_thread(members.group.wait_until_ready, keys)
    for post in members.posts:
        assert [hear(post), hear(post)] == [Want(key, True) for key in keys]
        assert set(members.group._ready[post.rank]) == set()
        post.say(Alive(post.rank, keys))
    ready()
    members.group.wait_until_ready(keys)


def test_a_program_that_could_not_be_compiled_elsewhere_is_asked_for_again(members, monkeypatch):
    """Whoever cannot compile it breaks down when it is asked once more."""
    monkeypatch.setattr(group_module, "ASK_AGAIN_SECONDS", 0.05)
    members.arrive()
    key = ProgramKey("forward", 8)
    ready = in_thread(members.group.wait_until_ready, [key])
    assert [hear(members.posts[0]), hear(members.posts[0])] == [Want(key, True)] * 2
    members.posts[0].say(Broken(1, "CapacityError", "no room to compile"))
    with pytest.raises(CapacityError, match="no room to compile"):
        ready()


@pytest.mark.parametrize("seconds", [None, 0.05])
def test_a_collective_that_failed_names_who_has_ended_where_that_is_known(members, monkeypatch, seconds):
    monkeypatch.setattr(group_module, "MOMENT_SECONDS", seconds or 20.0)
    members.arrive()
    if seconds is None:
        threading.Timer(0.1, members.group.fail, [EngineDeadError("rank 1: killed")]).start()
    step = GroupStep(Failing(), members.group)
    with pytest.raises(EngineError, match="reset by peer"):
        step.result()
    with pytest.raises(EngineDeadError, match="rank 1: killed" if seconds is None else "rank 0: .* reset by peer"):
        members.group.check()


class Failing:
    def result(self):
        raise EngineError("step 3 failed: connection reset by peer")


JOINING = """
import sys
from jaxpaged.executor import follower, group
secret, given = b"of these tests", {"jax": "1"}
if sys.argv[1] == "driver":
    made = group.Group(2, "127.0.0.1", None, secret, print, last_resort=lambda error: group.end_process())
    post = follower.Post(1, made.addresses, secret)
    from jaxpaged.executor.group_messages import Hello
    post.say(Hello(1, "process 1 of here", given))
    signs = follower.SignsOfLife(post)
    group.GRACE_SECONDS = 0.1
    made.gather(given, 20)
    made.join({}, "127.0.0.1:" + sys.argv[2], True, 2.0)
else:
    from jaxpaged.distributed.group import Membership
    from jaxpaged.executor.group_messages import Welcome
    made = group.Group(2, "127.0.0.1", None, secret, print, last_resort=lambda error: None)
    post = follower.Post(1, made.addresses, secret)
    import threading
    threading.Thread(target=follower.follow, args=(post, "process 1 of here", given, None, 2.0), daemon=True).start()
    made.gather(given, 20)
    made._send([1], Welcome({}, Membership("127.0.0.1:" + sys.argv[2], 2, 1, True)))
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
