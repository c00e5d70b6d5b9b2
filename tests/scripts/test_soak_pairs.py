"""scripts/soak_pairs.py tells what must not be. The run itself takes minutes, and is for people."""

import asyncio
import random
from collections import Counter

import pytest
import soak_pairs as script
from soak_clients import Places
from soak_faults import Fault
from soak_pair_faults import BROKEN, PairFaults, Pairs

FAULTS = {
    "killed prefill",
    "stopped prefill",
    "killed decode",
    "stopped decode",
    "killed core",
    "damaged pages",
    "lost pages",
}


@pytest.fixture
def pairs(tmp_path):
    return Pairs(tmp_path, ["demo"], [])


@pytest.fixture
def soak(pairs):
    return script.PairSoak(PairFaults(pairs, Places(0, []), random.Random(0)), random.Random(0), {}, None, quick=False)


def test_only_a_killed_decode_engine_may_be_noticed(soak):
    kinds = soak.faults.kinds
    assert kinds.keys() == FAULTS
    assert {name for name, (_, excuses) in kinds.items() if excuses} == {"killed decode", "killed core"}
    soak.faults.done += [
        Fault("killed prefill", frozenset(), 0.0, 100.0),
        Fault("killed decode", frozenset(BROKEN), 10.0, 20.0),
    ]
    assert soak.faults.excuse("502", 5.0, 11.0) and soak.faults.excuse("closed", 19.0, 30.0)
    assert not soak.faults.excuse("502", 21.0, 30.0) and not soak.faults.excuse("late", 11.0, 12.0)


def test_wrong_answers_are_told(soak):
    soak.seen["code word"] = Counter(right=98, wrong=2)
    assert soak.wrong_answers() == []
    soak.seen["sum"] = Counter(wrong=1)
    soak.problems["sum: a client got 'late'"] = 2
    assert soak.wrong_answers() == ["sum: a client got 'late' (2 times)", "3 of 101 sums and code words are wrong"]


def test_what_is_left_behind_is_told(pairs):
    assert pairs.left_behind() == []
    (pairs.pages / "space" / ".writing").mkdir(parents=True)
    (pairs.pages / "space" / ".writing" / "x.1.2").touch()
    decode = pairs.decode[0]
    (decode.folder / "jaxpaged-x").mkdir()
    pairs.proxy.logs = "a line\nTraceback (most recent call last):\nboom"
    unfinished, folder, traceback = sorted(pairs.left_behind(), key=lambda line: "decode" in line or "proxy" in line)
    assert "x.1.2 was left unfinished" in unfinished
    assert {"decode 1 was killed 0 times and left jaxpaged-x", "boom"} <= {folder, traceback[-4:]} | {
        traceback,
        folder[-4:],
    }
    decode.num_kills = 1
    assert len(pairs.left_behind()) == 2, "one that was killed can remove nothing"


def test_metrics_are_summed_over_labels(monkeypatch):
    async def text(port, path):
        return '# HELP a\na{x="1"} 2\na{x="2"} 3\nb 0\n'

    monkeypatch.setattr(script, "ask_text", text)
    assert asyncio.run(script.metrics(1)) == {"a": 5.0, "b": 0.0}


def test_an_engine_that_still_holds_something_is_named(monkeypatch, pairs):
    async def nothing(*args):
        return {"recompiles": 0}

    async def held(port):
        return {"vllm:kv_cache_usage_perc": 0.0, "jaxpaged:kv_leases": 2.0}

    monkeypatch.setattr(script, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(script, "ask", nothing)
    monkeypatch.setattr(script, "metrics", held)
    assert asyncio.run(script.left_over(pairs.prefill[0])) == ["prefill 1: jaxpaged:kv_leases is 2"]
