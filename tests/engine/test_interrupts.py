"""Ctrl-C at any line of the engine: the books are whole afterwards, no tokens are lost, and the engine goes on."""

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxpaged import interrupts
from jaxpaged.entrypoints.llm import LLM
from jaxpaged.errors import EngineDeadError
from jaxpaged.interrupts import Held, Watcher, accepted_interrupts, held_interrupts
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from tests.engine.fake_engine import Done, FakeExecutor, counting_model, make_engine

PACKAGE = str(Path(__file__).parents[2] / "jaxpaged")
WAITING = str(Path(__file__).parent / "fake_engine.py")
VOCAB = 300


class LineCounter:
    """Counts the lines that the package executes, and interrupts at one of them.

    Those of `interrupts.py` are left out: it runs before anything has changed, or when everything is done.
    """

    def __init__(self, interrupt_at=None):
        self.count, self.interrupt_at, self.where, self.was_held = 0, interrupt_at, None, False

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)

    def enter(self, frame, event, argument):
        path = frame.f_code.co_filename
        ours = path.startswith(PACKAGE) and not path.endswith("interrupts.py")
        return self.line if ours or (path == WAITING and frame.f_code.co_name == "result") else None

    def line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self.interrupt_at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self.was_held = isinstance(signal.getsignal(signal.SIGINT), Held)
                signal.raise_signal(signal.SIGINT)
        return self.line


@pytest.fixture(autouse=True)
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the user's handler is not back"
    signal.signal(signal.SIGINT, before)


def small_engine(num_steps=1):
    """Few blocks, so that requests are preempted and the prefix cache is used. A program runs `num_steps` steps."""
    executor = FakeExecutor(counting_model(VOCAB), VOCAB, num_blocks=14)
    return make_engine(executor, max_num_seqs=4, num_scheduler_steps=num_steps)[0]


def check_books(engine, where):
    core = engine._core
    for _ in range(3):  # what an abort left in flight comes back
        engine.step()
    core._scheduler.check_integrity()
    pool = core._scheduler.kv_cache_manager.pools[0]
    assert not core._scheduler.requests and not engine.has_unfinished_requests(), where
    assert pool.num_free_blocks == pool.num_usable_blocks, where


PROMPTS = [[20 + i] * (6 + i) for i in range(5)]


def check_generate(places, *, step, num_steps):
    """Interrupt one call of `generate` after the other, at every `step`-th line, on the same engine."""
    engine = small_engine(num_steps)
    llm = LLM.from_engine(engine)
    params = [SamplingParams(temperature=0.0, max_tokens=6 + 2 * i, n=1) for i in range(5)]
    answers = lambda: [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    expected = [[21 + i + j for j in range(6 + 2 * i)] for i in range(5)]
    with LineCounter() as lines:
        assert answers() == expected
    assert engine._core.stats().num_preemptions > 0, "the world is too easy"
    for place in range(places, lines.count, step):
        interrupted = True
        with contextlib.suppress(KeyboardInterrupt), LineCounter(place) as counter:
            answers()
            interrupted = False
        # With a filled prefix cache there are fewer lines than at first.
        assert interrupted == (counter.where is not None)
        check_books(engine, counter.where)
    assert answers() == expected


@pytest.mark.parametrize("num_steps", [1, 4])
def test_generate_can_be_interrupted_anywhere(num_steps):
    check_generate(1, step=397, num_steps=num_steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [1, 2])
def test_generate_can_be_interrupted_at_many_lines(first):
    check_generate(first, step=211, num_steps=4 if first % 2 else 1)


def persistently(call):
    """A user who calls again what was interrupted."""
    try:
        return call()
    except KeyboardInterrupt:
        return call()


def drive(engine, heard):
    """Step to the end, with everything between steps that an engine can be asked for."""
    number = 0
    while persistently(engine.has_unfinished_requests):
        for output in persistently(engine.step):
            heard.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
        number += 1
        if number == 4:
            persistently(lambda: engine.abort_request("gone"))
        if number == 6:
            persistently(engine.reset_prefix_cache)
        if number == 8:
            persistently(lambda: engine.sleep(1, "keep"))
            persistently(engine.wake_up)
        assert number < 200, "it does not come to an end"


def check_steps(first, *, step, num_steps):
    delta = SamplingParams(temperature=0.0, max_tokens=12, output_kind=RequestOutputKind.DELTA)
    engine, expected = small_engine(num_steps), {}

    def add():
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, delta)
            expected[str(i)] = [21 + i + j for j in range(12)]
        engine.add_request("gone", [5] * 9, delta)

    add()
    with LineCounter() as lines:
        drive(engine, {})
    for place in range(first, lines.count, step):
        heard = {}
        add()
        with LineCounter(place) as counter:
            drive(engine, heard)
        heard.pop("gone", None)
        if counter.was_held:  # else the interrupt hit between the engine's methods, where the caller answers for it
            assert heard == expected, counter.where
        check_books(engine, counter.where)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_an_engine_that_is_stepped_loses_no_token_to_an_interrupt(num_steps):
    check_steps(3, step=401, num_steps=num_steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [1, 2])
def test_an_engine_that_is_stepped_loses_no_token_to_an_interrupt_at_many_lines(first):
    check_steps(first, step=223, num_steps=4 if first % 2 else 1)


def test_a_request_is_added_as_a_whole_or_not_at_all():
    engine = small_engine()
    core, add = engine._core, lambda: engine.add_request("r", PROMPTS[0], SamplingParams(n=3, seed=1))
    with LineCounter() as lines:
        add()
    engine.abort_request("r")
    for place in range(1, lines.count):
        with contextlib.suppress(KeyboardInterrupt), LineCounter(place) as counter:
            add()
        assert len(core.unfinished()) in (0, 3), counter.where
        assert engine.has_unfinished_requests() == bool(core.unfinished()), counter.where
        engine.abort_request("r")
    check_books(engine, "at the end")


# ---- the holding itself


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_comes_at_the_end_of_the_block_or_where_it_is_accepted():
    done = []
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        with held_interrupts():
            done.append("inner")
        done.append("outer")
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        with accepted_interrupts():
            done.append("never")
    with pytest.raises(KeyboardInterrupt), held_interrupts(), accepted_interrupts():  # noqa: PT012
        interrupt()
        done.append("never")
    assert done == ["inner", "outer"]


def test_a_second_interrupt_gets_out_at_once():
    with pytest.raises(KeyboardInterrupt), held_interrupts():  # noqa: PT012
        interrupt()
        interrupt()
        raise AssertionError("it was held twice")


def test_the_users_own_handler_hears_of_it_once_and_stays():
    heard = []
    handler = lambda signum, frame: heard.append(signum)
    signal.signal(signal.SIGINT, handler)
    try:
        with held_interrupts():
            interrupt()
            assert heard == []
        assert heard == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
        with held_interrupts():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # somebody's wish within the block
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with held_interrupts():
            interrupt()  # ignored as before
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_and_code_that_nobody_holds_are_left_alone():
    seen = []

    def work():
        with held_interrupts(), accepted_interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
    with pytest.raises(KeyboardInterrupt), accepted_interrupts():
        interrupt()


def test_an_engine_whose_books_a_second_interrupt_tore_says_so(monkeypatch):
    """It serves nobody with books that nobody can vouch for."""
    engine = small_engine()
    engine.add_request("r", PROMPTS[0], SamplingParams(max_tokens=3))
    scheduler = engine._core._scheduler
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "schedule", lambda *limits: [interrupt(), interrupt()])
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_a_wait_is_where_an_interrupt_is_taken(monkeypatch):
    engine = small_engine()
    engine.add_request("r", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3))
    results = []
    with monkeypatch.context() as patch:
        patch.setattr(Done, "result", lambda self: [interrupt(), results.append("after")])
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert results == []
    while persistently(engine.has_unfinished_requests):
        results += engine.step()
    assert results[-1].outputs[0].token_ids == [21, 22, 23]


# ---- a device that never answers -------------------------------------------------------------------

STUCK = """
import ctypes, signal, sys
from jaxpaged import interrupts

interrupts.watcher = lambda watcher=interrupts.Watcher(patience=0.2, reaction=0.2): watcher
libc = ctypes.CDLL(None)
lock = ctypes.create_string_buffer(256)  # a mutex of zeros is one that is free
libc.pthread_mutex_lock(lock)
signal.signal(signal.SIGINT, lambda *_: None)
with interrupts.held_interrupts():
    with interrupts.accepted_interrupts():
        print("waiting", flush=True)
        libc.pthread_mutex_lock(lock)  # in C, and no signal ends it
"""


def test_ctrl_c_ends_a_process_whose_device_never_answers():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waiting\n"
        while not select.select([process.stderr], [], [], 0.3)[0]:
            process.send_signal(signal.SIGINT)  # before anything is said, more of them mean nothing else
            process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert "Press Ctrl-C again" in process.stderr.readline() and process.poll() is None
        ended = select.select([process.stderr], [], [], 0)[0]
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:  # one right behind the message may count as one before it
            process.send_signal(signal.SIGINT)
            ended = select.select([process.stderr], [], [], 0.5)[0]
        assert ended, "Ctrl-C after the message had no effect"
        assert "the process ends" in process.stderr.read()
        assert process.wait() == 130
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_that_is_taken_late_ends_nothing(capfd):
    def wait():
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            deadline = time.monotonic() + 60
            while "Press Ctrl-C again" not in "".join(told):
                assert time.monotonic() < deadline, "nobody noticed that the interrupt had no effect"
                told.append(capfd.readouterr().err)
                time.sleep(0.01)
            with accepted_interrupts():
                pytest.fail("the interrupt was not delivered")

    told = []
    quick = Watcher(patience=0.1, reaction=30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts, "watcher", lambda: quick)
        with pytest.raises(KeyboardInterrupt):
            wait()
    assert not quick.is_watching and signal.set_wakeup_fd(-1) == -1


def test_an_event_loop_keeps_its_file_descriptor():
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with held_interrupts():
            assert not interrupts.watcher().is_watching
            assert signal.set_wakeup_fd(theirs.fileno()) == theirs.fileno()
    finally:
        assert signal.set_wakeup_fd(before) == theirs.fileno()
        ours.close()
        theirs.close()


def test_an_interrupt_while_other_weights_are_heeded_waits_until_the_books_are_whole():
    engine = small_engine()
    core, executor = engine._core, engine._core.executor
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    manager, changed = core._scheduler.kv_cache_manager, []

    def change_root(version, requests, change=manager.change_root):
        signal.raise_signal(signal.SIGINT)
        change(version, requests)
        changed.append(version)

    manager.change_root = change_root
    executor.collective_rpc = lambda *_: setattr(executor, "weights_version", "others")
    with pytest.raises(KeyboardInterrupt):
        engine.collective_rpc("replace")
    assert changed == ["others"]
    while engine.has_unfinished_requests():
        results = engine.step()
    assert len(results[0].outputs[0].token_ids) == 9
    check_books(engine, "note_weight_update")
