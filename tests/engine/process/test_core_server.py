"""Front ends that misbehave, leave, or call a request as another does, harm nobody."""

import contextlib
import random
import time

import numpy as np
import pytest
import zmq

from jaxpaged.encoding.frames import FrameDecoder, FrameEncoder
from jaxpaged.engine.core_calls import CALLS
from jaxpaged.engine.process import wire
from jaxpaged.engine.process.zmq_client import TYPES, ask_facts, dealer
from jaxpaged.errors import EngineDeadError
from jaxpaged.messages import EngineCoreRequest
from jaxpaged.sampling_params import SamplingParams
from tests.engine.fake_core import VOCAB_SIZE, CountingExecutor, answer, core_in_thread
from tests.engine.test_processed_items import key_of, request_of


class FrontEnd:
    """One that speaks plain frames."""

    def __init__(self, context, address):
        self.socket = dealer(context, address)
        self.send(wire.HELLO, None)
        self.facts = self.receive(wire.READY)

    def send(self, kind, value):
        self.socket.send_multipart([kind, *FrameEncoder().encode(value)])

    def receive(self, wanted):
        """The value of the next message of a kind."""
        while True:
            assert self.socket.poll(10_000), f"no {wanted} came"
            kind, *frames = self.socket.recv_multipart()
            if kind == wanted:
                return FrameDecoder(TYPES[kind]).decode(frames[:1] if kind == wire.ANSWER else frames)

    def add(self, request_id, max_tokens=5, num_prompt=4, **params):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"seed": 0, **params})
        self.send(wire.ADD, [EngineCoreRequest(request_id, [7] * num_prompt, params, 0.0)])

    def add_seeing(self, request_id, *names, max_tokens=5):
        """A request with pictures, whose pixels come otherwise."""
        request = request_of(request_id, *names)
        request.sampling_params.max_tokens, request.sampling_params.ignore_eos = max_tokens, True
        self.send(wire.ADD, [request])

    def bring(self, request_id, name, dtype=np.uint8):
        self.send(wire.ITEM, wire.Item(request_id, key_of(name), np.zeros((2, 3), dtype)))

    def wanted(self):
        told = self.receive(wire.WANTED)
        return told.request_id, [key.rstrip(b".").decode() for key in told.keys]

    def tokens(self, request_id):
        """All tokens of a request, to its end."""
        tokens = []
        while True:
            for output in self.receive(wire.STEP).outputs:
                if output.request_id == request_id:
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens

    def running(self):
        """How many requests the core has, once it has settled."""
        while True:
            stats = self.receive(wire.STATS).scheduler
            if not stats.num_waiting_reqs:
                return stats.num_running_reqs


@pytest.fixture(scope="module")
def address():
    with core_in_thread(max_num_seqs=8, max_model_len=1024) as address:
        yield address


@pytest.fixture
def connect(address):
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())

        def connect():
            front_end = FrontEnd(context, address)
            stack.callback(front_end.socket.close)
            return front_end

        yield connect


def test_a_front_end_learns_what_it_must_know(address, connect):
    facts = connect().facts
    assert facts == ask_facts(address, 5.0)
    assert facts.vocab_size == VOCAB_SIZE
    assert facts.options["max_num_seqs"] == 8


def test_where_no_core_is_the_error_says_so(short_path):
    with pytest.raises(EngineDeadError, match=r"no engine core answers at ipc://.*within 0\.2 s"):
        ask_facts(f"ipc://{short_path}/x", 0.2)


def test_two_front_ends_may_use_the_same_request_id(connect):
    one, two = connect(), connect()
    one.add("same", 30, num_prompt=3)
    two.add("same", 20, num_prompt=9)
    assert two.tokens("same") == answer(9, 20)
    assert one.tokens("same") == answer(3, 30)


def test_one_front_end_may_not_use_a_request_id_twice(connect):
    front_end = connect()
    front_end.add("r", 500)
    front_end.add("r", 5)
    refusal = front_end.receive(wire.REFUSED)
    assert (refusal.request_id, refusal.parameter) == ("r", "request_id")
    assert front_end.tokens("r")[-100:] == answer(4, 500)[-100:]


def test_pixels_come_before_a_request_or_when_the_core_asks_for_them(connect):
    one, two = connect(), connect()
    one.bring("r", "x")
    one.add_seeing("r", "x", "y")
    assert one.wanted() == ("r", ["y"])
    two.add_seeing("r", "x", "z")  # x came for another front end's request
    two.add("text")
    assert two.wanted() == ("r", ["z"])
    assert two.tokens("text") == answer(4, 5), "others do not wait"
    two.bring("r", "z")
    one.bring("r", "y", np.float32)  # no pixels
    one.bring("r", "y")
    num_prompt = len(request_of("", "x", "y").prompt_token_ids)
    assert one.tokens("r") == two.tokens("r") == answer(num_prompt, 5)
    one.add_seeing("again", "x", "y", "z")
    assert one.wanted() == ("again", []) and len(one.tokens("again")) == 5


def test_a_request_that_waits_for_pixels_is_aborted_and_refused_like_any_other(connect):
    front_end = connect()
    front_end.add_seeing("r", "never")
    assert front_end.wanted() == ("r", ["never"])
    front_end.add_seeing("r", "x")
    assert front_end.receive(wire.REFUSED).request_id == "r"
    front_end.send(wire.ABORT, ["r"])
    front_end.add_seeing("large", *"abcdefghijklmnopq" * 300)
    refusal = front_end.receive(wire.REFUSED)
    assert refusal.request_id == "large" and refusal.parameter == "prompt", "it does not wait for pixels first"
    front_end.bring("r", "of the next")
    front_end.send(wire.ABORT, ["r"])
    front_end.add_seeing("r", "of the next")
    assert front_end.wanted() == ("r", ["of the next"]), "those of an aborted request are gone"
    front_end.bring("r", "of the next")
    assert len(front_end.tokens("r")) == 5


def test_sleep_ends_requests_that_wait_for_pixels(connect):
    front_end = connect()
    front_end.add_seeing("r", "never")
    front_end.wanted()
    front_end.send(wire.CALL, wire.Call(1, "sleep", {"level": 1, "mode": "abort"}))
    outputs = front_end.receive(wire.STEP).outputs
    assert [(each.request_id, each.finish_reason) for each in outputs] == [("r", "abort")]
    front_end.send(wire.CALL, wire.Call(2, "wake_up", {}))
    front_end.receive(wire.ANSWER)
    front_end.add("after")
    assert front_end.tokens("after") == answer(4, 5)


def test_an_abort_ends_only_the_own_request(connect):
    one, two = connect(), connect()
    one.add("same", 900)
    two.add("same", 300)
    one.send(wire.ABORT, ["same", "unknown", "same"])
    assert two.tokens("same") == answer(4, 300)
    one.add("same", 3)
    assert one.tokens("same")[-3:] == answer(4, 3)


@pytest.mark.parametrize(
    ("request_", "parameter"),
    [
        ({"num_prompt": 2000}, "prompt"),
        ({"seed": None}, "seed"),
        ({"n": 2}, "seed"),
        ({"max_tokens": None}, "max_tokens"),
        ({"num_prompt": 0}, "prompt"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(connect, request_, parameter):
    front_end = connect()
    front_end.add("good", 20)
    front_end.add("bad", **request_)
    refusal = front_end.receive(wire.REFUSED)
    assert (refusal.request_id, refusal.parameter) == ("bad", parameter)
    assert "bad@" not in refusal.message
    front_end.add("good too", 5)
    assert front_end.tokens("good too") == answer(4, 5)


def test_a_token_id_outside_the_vocabulary_is_refused(connect):
    front_end = connect()
    for token_id in (-1, VOCAB_SIZE, 2**40):
        request = EngineCoreRequest("r", [5, token_id], SamplingParams(seed=0), 0.0)
        front_end.send(wire.ADD, [request])
        assert f"vocabulary of {VOCAB_SIZE}" in front_end.receive(wire.REFUSED).message


def test_messages_that_make_no_sense_are_dropped(connect):
    front_end, draw = connect(), random.Random(0)
    kinds = [wire.HELLO, wire.ADD, wire.ABORT, wire.CALL, b"", b"no kind", b"\xff" * 300]
    good = FrameEncoder().encode([EngineCoreRequest("r", [1], SamplingParams(seed=0), 0.0)])[0]
    for _ in range(300):
        kind, cut = draw.choice(kinds), draw.randrange(len(good))
        junk = draw.choice([[], [draw.randbytes(20)], [good[:cut]], [good[:cut] + draw.randbytes(3)], [b"\x91" * 5000]])
        front_end.socket.send_multipart([kind, *junk])
    front_end.socket.send(b"")
    front_end.add("good", 5)
    assert front_end.tokens("good") == answer(4, 5)


def test_calls_are_answered_and_unknown_ones_refused(connect):
    front_end = connect()
    for call_id, name in enumerate([*CALLS, "shutdown", "__init__"]):
        front_end.send(wire.CALL, wire.Call(call_id, name))
        answered = front_end.receive(wire.ANSWER)
        assert answered.call_id == call_id
        refused = name.endswith(("_lora", "_loras", "_extension")) or name in (
            "check_weight_update",
            "finish_weight_update",
        )
        assert (answered.error is None) == (name in CALLS and not refused)


def call(front_end, call_id, name, **arguments):
    front_end.send(wire.CALL, wire.Call(call_id, name, arguments))


def test_a_front_end_that_waits_for_sleep_hears_of_it_when_everybody_is_done(connect):
    one, other = connect(), connect()
    other.add("r", 300)
    call(one, 1, "sleep", mode="wait")
    assert other.tokens("r") == answer(4, 300)
    assert one.receive(wire.ANSWER) == wire.Answer(1)
    while other.receive(wire.STATS).scheduler.sleep_level != 1:
        pass
    other.add("late", 5)
    call(other, 2, "sleep", mode="wait", level=2)  # deeper, though a request waits
    assert other.receive(wire.ANSWER) == wire.Answer(2)
    call(one, 3, "wake_up", tags=["weights", "kv_cache"])
    assert one.receive(wire.ANSWER) == wire.Answer(3)
    assert other.tokens("late") == answer(4, 5)


def test_sleep_that_waits_begins_when_the_last_request_is_aborted(connect):
    front_end = connect()
    front_end.add("long", 900, extra_args={"fake": "slow"})
    front_end.receive(wire.STEP)
    call(front_end, 1, "sleep", mode="wait")
    front_end.send(wire.ABORT, ["long"])
    assert front_end.receive(wire.ANSWER) == wire.Answer(1)
    call(front_end, 2, "wake_up")
    assert front_end.receive(wire.ANSWER) == wire.Answer(2)
    front_end.add("end slowness", 5, extra_args={"fake": "raise"})
    assert front_end.tokens("end slowness") == []


def test_waking_calls_off_a_sleep_that_waits(connect):
    one, other = connect(), connect()
    one.add("r", 900)
    call(one, 1, "sleep", mode="wait")
    call(one, 2, "wake_up")
    answers = [other_answer := one.receive(wire.ANSWER), one.receive(wire.ANSWER)]
    assert other_answer == wire.Answer(2)
    assert answers[1].call_id == 1 and answers[1].error[0] == "ConflictError"
    assert one.tokens("r")[-1:] == answer(4, 900)[-1:]
    assert other.facts == one.facts, "and nobody else is disturbed"


@pytest.mark.parametrize(
    "arguments", [{"level": "2"}, {"level": True}, {"mode": ["wait"]}, {"mode": "wait", "level": []}, {"depth": 1}]
)
def test_senseless_arguments_are_answered_with_an_error(connect, arguments):
    front_end = connect()
    call(front_end, 1, "sleep", **arguments)
    call(front_end, 2, "is_sleeping")
    assert front_end.receive(wire.ANSWER).error is not None
    assert front_end.receive(wire.ANSWER) == wire.Answer(2)
    front_end.add("good", 5)
    assert front_end.tokens("good") == answer(4, 5)


def test_an_idle_core_tells_when_a_program_is_compiled(monkeypatch):
    stats = {"programs": 2, "programs_ready": 1}
    monkeypatch.setattr("jaxpaged.engine.process.core_server.STATS_INTERVAL", 0.02)
    monkeypatch.setattr(CountingExecutor, "stats", lambda self: dict(stats))
    with core_in_thread(max_num_seqs=8, max_model_len=64) as address, zmq.Context() as context:
        front_end = FrontEnd(context, address)
        with contextlib.closing(front_end.socket):
            assert front_end.receive(wire.STATS).executor["programs_ready"] == 1
            stats["programs_ready"] = 2
            while front_end.receive(wire.STATS).executor["programs_ready"] == 1:
                pass


def test_an_idle_core_tells_what_changes_and_nothing_while_nothing_does(monkeypatch):
    stats = {"kv_leases": 2}
    monkeypatch.setattr("jaxpaged.engine.process.core_server.STATS_INTERVAL", 0.02)
    monkeypatch.setattr(CountingExecutor, "stats", lambda self: dict(stats))
    with core_in_thread(max_num_seqs=8, max_model_len=64) as address, zmq.Context() as context:
        front_end = FrontEnd(context, address)
        with contextlib.closing(front_end.socket):
            assert front_end.receive(wire.STATS).executor["kv_leases"] == 2
            time.sleep(1.0)
            while front_end.socket.poll(0):
                front_end.receive(wire.STATS)
            assert not front_end.socket.poll(700)
            stats["kv_leases"] = 1  # it was not given back in time
            assert front_end.receive(wire.STATS).executor["kv_leases"] == 1


def test_requests_of_a_front_end_that_left_are_aborted(connect):
    leaving, staying = connect(), connect()
    leaving.add("long", 1000, extra_args={"fake": "slow"})  # 20 s of steps
    leaving.receive(wire.STEP)
    leaving.socket.close(linger=0)
    staying.add("r", 20)
    assert staying.tokens("r") == answer(4, 20)
    assert staying.running() == 0
    staying.add("end slowness", 5, extra_args={"fake": "raise"})
    assert staying.tokens("end slowness") == []


def test_a_front_end_that_does_not_read_stops_nobody(connect):
    silent, other = connect(), connect()
    for number in range(8):
        silent.add(str(number), 1000)
    other.add("r", 50)
    assert other.tokens("r") == answer(4, 50)
    assert silent.tokens("7") == answer(4, 1000)
