"""scripts/soak.py tells what must not be; a small run, whose model counts, survives every fault. No time is judged."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import soak as script
import soak_clients
from soak_clients import CORE_FAULT, NO_ROOM, Client, Places, Refused, outcome, sorts
from soak_faults import Fault, Faults
from soak_pictures import Picture, PictureClients

FAULTS = {"killed core", "full queue", "corrupt frames", "stopped core", "broken clients"}
GOOD = {"jaxpaged:engine_restarts_total": 1.0, "vllm:num_preemptions_total": 0.0}


def state(server=100.0, core=500.0, files=40, decoders=0.0, **metrics):
    return script.State(server, core, files, {**GOOD, **metrics}, decoders)


@pytest.fixture
def faults():
    made = Faults(None, None, Places(0, []), 0, 8, random.Random(0))
    made.done += [
        Fault("killed core", frozenset(CORE_FAULT), 10.0, 20.0),
        Fault("full queue", frozenset(NO_ROOM), 30.0, 31.0),
    ]
    return made


@pytest.fixture
def soak(faults):
    return script.Soak(faults, random.Random(0), sorts(0, with_grammars=True), None, quick=False)


def test_a_run_in_which_nothing_was_wrong_held(soak):
    soak.seen["HTTP sum"] = Counter(right=99, wrong=1)
    assert soak.judge(state(), state(102.9, 514.0, 47), "lines") == []


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ({"server": 103.1}, "server: 103 MiB at the end"),
        ({"core": 516.0}, "core: 516 MiB"),
        ({"files": 49}, "49 files are open"),
        ({"jaxpaged:engine_restarts_total": 2.0}, "replaced 2 times, for 1 faults"),
        ({"jaxpaged:recompiles": 1.0}, "1 programs were compiled too late"),
    ],
)
def test_what_is_left_behind_is_told(soak, last, told):
    [found] = soak.judge(state(), state(**last), "")
    assert told in found


def test_wrong_sums_tracebacks_and_faults_without_an_end_are_told(soak):
    soak.seen["gRPC sum"] = Counter(right=90, wrong=10)
    soak.faults.problems.append("full queue: nobody was served again")
    found = soak.judge(state(), state(), "a\nTraceback (most recent call last):\nboom")
    assert [each.partition(",")[0].partition(":")[0] for each in found] == [
        "full queue",
        "10 of 100 sums are wrong",
        "the log has tracebacks",
    ]


def test_with_pictures_all_processes_count_together(soak):
    soak.pictures = [Picture(b"", "png", "A red circle.")]
    soak.seen["chat"] = Counter(right=90, wrong=10)
    found = soak.judge(state(decoders=80), state(server=120, decoders=110), "")
    assert found[0] == "10 of 100 answers are wrong" and len(found) == 2
    assert found[1] == "all processes: 730 MiB at the end, 680 after the warm-up"


def test_a_server_that_leaves_a_process_or_ends_badly_is_told(monkeypatch):
    monkeypatch.setattr(script, "still_running", lambda pids: [each for each in pids if each > 7])
    ended = lambda status: SimpleNamespace(process=SimpleNamespace(returncode=status))
    assert script.left_behind(ended(0), [6, 7]) == []
    assert script.left_behind(ended(1), [7, 8]) == [
        "process 8, which the server had started, runs on",
        "the server ended with status 1",
    ]


@pytest.mark.parametrize(
    ("status", "begin", "end", "excused"),
    [
        ("503", 5.0, 11.0, True),
        ("503", 19.0, 50.0, True),
        ("503", 21.0, 29.0, False),
        ("500", 12.0, 13.0, False),
        ("UNAVAILABLE", 12.0, 13.0, True),
        ("429", 12.0, 13.0, False),
        ("RESOURCE_EXHAUSTED", 30.5, 40.0, True),
        ("late", 12.0, 13.0, False),
    ],
)
def test_errors_are_excused_only_by_a_fault_of_that_time(faults, status, begin, end, excused):
    assert faults.excuse(status, begin, end) == excused


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (Refused("503"), "503"),
        (ConnectionResetError(), "closed"),
        (ValueError("the stream has no end"), "torn"),
        (KeyError("choices"), "torn"),
    ],
)
def test_what_a_client_got_is_a_word(monkeypatch, error, word):
    async def fail(client):
        raise error

    async def wait(client):
        await asyncio.sleep(60)

    client = Client(Places(0, []), random.Random(0))
    assert asyncio.run(outcome(fail, client)).startswith(word)
    monkeypatch.setattr(soak_clients, "SECONDS", 0.01)
    assert asyncio.run(outcome(wait, client)) == "late"


def test_every_kind_of_client_refuses_errors_of_the_server():
    for kind in (*sorts(0, with_grammars=True).values(), *PictureClients([]).sorts().values()):
        assert not kind.good & {"500", "503", "429", "INTERNAL", "UNKNOWN", "UNAVAILABLE", "late", "torn"}


@pytest.mark.exhaustive
def test_a_small_run_survives_every_fault():
    command = [sys.executable, script.__file__, "--quick", "--requests", "60", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "it held"
    assert {line[:24].strip() for line in lines} >= {*sorts(0, with_grammars=False), *FAULTS}
