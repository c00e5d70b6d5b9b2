"""A core's process: how it starts, fails to start, ends, and is replaced."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.process import core_child, core_supervisor, heartbeat
from jaxpaged.engine.process.core_supervisor import CoreSupervisor, private_directory
from jaxpaged.errors import CapacityError, ConfigError, EngineDeadError
from tests.engine import fake_core

FAKE = "tests.engine.fake_core"


def make_supervisor(factory="build", max_restarts=2, step_timeout=60.0, **options):
    config = EngineConfig.from_options(**options)
    return CoreSupervisor(config, step_timeout=step_timeout, max_restarts=max_restarts, factory=f"{FAKE}:{factory}")


def start(supervisor):
    """Begin, and wait until options and model are known: these."""
    supervisor.begin()
    return supervisor.facts()


def alive(pid):
    """Whether a process exists and is more than an entry in the system's table."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_a_process_dies_and_is_replaced_until_it_has_died_too_often():
    supervisor, states = make_supervisor(max_restarts=1, max_num_seqs=4), []
    supervisor.listen(states.append)
    try:
        assert start(supervisor).options["max_num_seqs"] == 4
        supervisor.wait_until_serving()
        first = supervisor.pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: [state.phase for state in states] == ["serving", "restarting", "serving"])
        assert supervisor.pid != first
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_for(lambda: supervisor.state.phase == "dead")
        assert "signal 9 (SIGKILL" in states[1].reason
        assert "restarted 1 times within an hour" in supervisor.state.reason
    finally:
        supervisor.close()
    assert not os.path.exists(os.path.dirname(supervisor.address.removeprefix("ipc://")))


def test_closing_ends_the_process_and_removes_its_directory():
    supervisor = make_supervisor()
    start(supervisor)
    directory = Path(supervisor.address.removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    supervisor.wait_until_serving()
    for harmless in (signal.SIGINT, signal.SIGTERM):  # the front end decides when to end
        os.kill(supervisor.pid, harmless)
    time.sleep(0.05)
    assert supervisor.state.phase == "serving"
    assert alive(supervisor.pid)
    assert os.getpgid(supervisor.pid) != os.getpgid(0), "a terminal's Ctrl-C would reach it"
    supervisor.close()
    supervisor.close()
    assert not alive(supervisor.pid)
    assert not directory.exists()


def test_closing_while_it_loads_ends_it_at_once():
    supervisor = make_supervisor()
    start(supervisor)
    supervisor.close()
    assert not alive(supervisor.pid)


def test_an_error_of_loading_keeps_its_class_and_its_words():
    supervisor = make_supervisor("build_nothing")
    start(supervisor)
    with pytest.raises(CapacityError, match="need 3 GiB, but 2 GiB are free"):
        supervisor.wait_until_serving()
    supervisor.close()


def test_a_core_that_can_never_compute_is_not_replaced_and_its_sentence_is_the_reason():
    """Nobody has asked it for anything."""
    supervisor, states = make_supervisor("build_what_cannot_compute", max_restarts=5), []
    supervisor.listen(states.append)
    try:
        start(supervisor)
        supervisor.wait_until_serving()
        wait_for(lambda: supervisor.state.phase == "dead")
        assert [state.phase for state in states] == ["serving", "dead"]
        assert supervisor.state.reason == "the model cannot run: program forward of size 8 cannot be compiled: no"
    finally:
        supervisor.close()


@pytest.mark.parametrize("factory", ["build_nothing", None])
def test_what_ends_the_start_is_told_to_who_waits_for_it_and_not_logged_besides(factory, caplog):
    caplog.set_level("INFO", "jaxpaged")
    supervisor = make_supervisor(factory) if factory else make_supervisor(max_model_len=50_000)

    def wait():
        start(supervisor)
        supervisor.wait_until_serving()

    with pytest.raises((CapacityError, ConfigError), match="need 3 GiB|max_model_len is 50000, but the model was made"):
        wait()
    supervisor.close()
    assert caplog.records == []


def test_a_process_that_is_killed_while_it_loads_is_not_tried_again():
    supervisor = make_supervisor("build_and_die")
    with pytest.raises(EngineDeadError, match=r"signal 9 \(SIGKILL.*while it was loading"):
        start(supervisor)
    supervisor.close()


STOPS = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("program", [core_child.PROGRAM, STOPS], ids=["while it loads", "before its first line"])
def test_a_process_that_stops_while_it_loads_is_ended(monkeypatch, program):
    monkeypatch.setattr(core_child, "PROGRAM", program)
    monkeypatch.setattr(core_supervisor, "LOADING_PATIENCE", 2.0)
    monkeypatch.setattr(heartbeat, "LEAST_PATIENCE", 2.0)
    supervisor = make_supervisor("build_and_stop", step_timeout=0.5)
    with pytest.raises(EngineDeadError, match="no sign of life for 2 s.*while it was loading"):
        start(supervisor)
    assert not alive(supervisor.pid)
    supervisor.close()


def test_a_process_that_the_system_does_not_end_is_the_end_of_the_engine(monkeypatch):
    monkeypatch.setattr(core_child, "SECONDS_TO_END", 0.01)
    monkeypatch.setattr(core_child, "SECONDS_AFTER_KILL", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)
    supervisor = make_supervisor(step_timeout=0.5)
    start(supervisor)
    supervisor.wait_until_serving()
    monkeypatch.setattr(heartbeat, "LEAST_PATIENCE", 1.0)
    os.kill(supervisor.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(core_child.CoreChild, "kill", lambda self: None)
        wait_for(lambda: supervisor.state.phase == "dead")
    assert "the system does not end it" in supervisor.state.reason
    with contextlib.suppress(ProcessLookupError):  # the supervisor may have killed it since it can
        os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.close()


def test_an_option_that_is_no_plain_data_is_refused():
    with pytest.raises(ConfigError, match="logits_processors is .*module:Class"):
        make_supervisor(logits_processors=[object])


def test_a_socket_needs_a_short_path(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    short = private_directory()
    short.rmdir()
    assert short.parent == Path("/tmp")
    monkeypatch.setattr("jaxpaged.engine.process.core_supervisor.SHORT_FOLDER", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="Set TMPDIR to a shorter folder"):
        private_directory()
    assert not list(long.iterdir())


PARENT = """
import os, sys
from jaxpaged.config import EngineConfig
from jaxpaged.engine.process.core_supervisor import CoreSupervisor
supervisor = CoreSupervisor(EngineConfig(), step_timeout=60.0, max_restarts=5, factory=sys.argv[1])
supervisor.begin()
supervisor.wait_until_serving()
print(supervisor.pid, supervisor.address.removeprefix("ipc://"), flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_process_ends_with_its_parent():
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", PARENT, fake_core.FACTORY],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, socket = done.stdout.split()
    wait_for(lambda: not alive(int(pid)))
    wait_for(lambda: not os.path.exists(os.path.dirname(socket)))


def test_no_thread_is_left_behind():
    supervisor = make_supervisor()
    before = threading.active_count()
    start(supervisor)
    supervisor.close()
    assert threading.active_count() == before
