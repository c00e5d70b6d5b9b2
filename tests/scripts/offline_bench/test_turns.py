"""Processes that take turns: one runs at a time, and its clock stands still while it does not."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from offline_bench.engines import own_time
from offline_bench.turns import Clock, Runner, Turns

PROGRAM = """
    import json, sys, time
    sys.path.insert(0, {folder!r})
    real = time.perf_counter
    import own_time
    own_time.use(sys.argv[1])
    begin, last = time.perf_counter(), real()
    ran = []  # when, by everybody's clock
    while time.perf_counter() - begin < {seconds}:
        now = real()
        if now - last > 0.05 or not ran:
            ran.append([now, now])
        ran[-1][1] = last = now
    print(json.dumps({{"own": time.perf_counter() - begin, "monotonic": time.monotonic() - begin, "ran": ran}}))
"""


def start(tmp_path, seconds):
    program = tmp_path / f"program-{seconds}.py"
    program.write_text(textwrap.dedent(PROGRAM.format(folder=str(Path(own_time.__file__).parent), seconds=seconds)))
    clock = Clock(tmp_path)
    command = [sys.executable, str(program), str(clock.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    return process, Runner(process.pid, clock)


def state(process_id):
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_processes_never_run_side_by_side_and_each_sees_its_own_time(tmp_path):
    turns = Turns(0.1)
    begin = time.perf_counter()
    (first, first_runner), (second, second_runner) = start(tmp_path, 0.7), start(tmp_path, 0.7)
    with turns.taken_by(first_runner, second_runner):
        told = [json.loads(process.stdout.readline()) for process in (first, second)]
    elapsed = time.perf_counter() - begin
    assert 1.4 <= sum(one["own"] for one in told) < elapsed + 0.1  # they had to share
    for one in told:
        assert one["monotonic"] == pytest.approx(one["own"], abs=0.1)  # however long it was stopped
    assert len(told[0]["ran"]) >= 3 and len(told[1]["ran"]) >= 3
    overlaps = [min(a[1], b[1]) - max(a[0], b[0]) for a in told[0]["ran"][1:] for b in told[1]["ran"][1:]]
    assert max(overlaps) < 0.02
    for process in (first, second):
        process.wait()
        process.stdout.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for the state of processes")
def test_who_is_alone_is_never_stopped_and_who_leaves_goes_on(tmp_path):
    turns = Turns(0.02)
    (first, first_runner), (second, second_runner) = start(tmp_path, 60), start(tmp_path, 60.0)
    try:
        with turns.taken_by(first_runner):
            time.sleep(0.1)
            assert state(first.pid) != "T"
            began = time.perf_counter()
            with turns.taken_by(second_runner):
                seen = set()
                for _ in range(200):
                    time.sleep(0.002)
                    seen.add((state(first.pid) == "T", state(second.pid) == "T"))
                assert {(True, False), (False, True)} <= seen
            assert state(first.pid) != "T" and state(second.pid) != "T"
            assert 0 < first_runner._clock.stopped_seconds[0] < time.perf_counter() - began
    finally:
        for process in (first, second):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def test_all_that_take_turns_can_be_ended_and_one_that_ended_by_itself_disturbs_nobody(tmp_path):
    turns = Turns(0.02)
    (short, short_runner), (long, long_runner) = start(tmp_path, 0.1), start(tmp_path, 60)
    with turns.taken_by(short_runner, long_runner):
        assert short.stdout.readline()
        short.wait(10)
        time.sleep(0.1)  # turns of nobody
        turns.end_all()
        assert long.wait(10) == -signal.SIGKILL
    for process in (short, long):
        process.stdout.close()
