"""The lines between the benchmark and an engine: what crashes, hangs or lies is reported and stops nothing."""

import sys
import textwrap
from pathlib import Path

import session
from offline_bench.processes import run_process
from offline_bench.turns import Turns

ENGINE = """
    import sys
    sys.path.insert(0, {folder!r})
    from session import Session
    class Engine:
        versions = {{"fake": "1"}}
        def settle(self): pass
        def complete(self, requests, watch, shared_prefix):
            print("noise on standard output")
            for index, request in enumerate(requests):
                {body}
                for _ in range(request["max_tokens"]):
                    watch.add(index, [7])
    Session().run(Engine())
    {farewell}
"""
JOB = {
    "threads": 1,
    "warm_up": [{"prompt_token_ids": [1], "max_tokens": 1}],
    "workloads": [
        {"name": name, "shared_prefix": 0, "requests": [{"prompt_token_ids": [index], "max_tokens": 3}]}
        for index, name in enumerate(("one", "two"))
    ],
}


def run_fake(tmp_path, body="pass", farewell="", timeout=60.0, **more):
    program = tmp_path / "engine.py"
    folder = str(Path(session.__file__).parent)
    program.write_text(textwrap.dedent(ENGINE.format(folder=folder, body=body, farewell=farewell)))
    return run_process([sys.executable, str(program)], JOB | more, tmp_path / "log", timeout, {}, Turns())


def test_an_engine_says_when_it_is_ready_and_what_each_workload_took(tmp_path):
    outcome = run_fake(tmp_path)
    assert outcome.error is None
    assert [event["event"] for event in outcome.events] == ["ready", "first_token", "settled", "run", "run", "end"]
    run = outcome.events[3]
    assert run["workload"] == "one"
    assert 0 < run["first_seconds"][0] <= run["last_seconds"][0] <= run["total_seconds"]
    assert run["first_token_ids"] == [7]
    assert outcome.events[-1]["peak_bytes"] > 1 << 20
    assert "noise" in (tmp_path / "log").read_text()


def test_the_first_minute_comes_before_anything_is_waited_for_and_other_batches_after_it(tmp_path):
    batches = [[{"prompt_token_ids": [10 + index], "max_tokens": 2}] for index in range(400)]
    body = "; ".join(
        [
            "import time",
            "seen = self.__dict__.setdefault('seen', set())",
            "new = request['prompt_token_ids'][0]",
            "assert new < 10 or new not in seen",
            "seen.add(new)",
            "time.sleep(0.01)",
        ]
    )
    outcome = run_fake(tmp_path, body=body, first_minute={"seconds": 0.4, "batches": batches})
    assert outcome.error is None
    assert [event["event"] for event in outcome.events][1:4] == ["first_token", "settled", "first_minute"]
    minute = outcome.events[3]
    assert 10 < minute["per_second"] < 200 and 10 < minute["later_per_second"] < 200


def test_a_workload_that_fails_does_not_stop_the_next(tmp_path):
    outcome = run_fake(tmp_path, body="if request['prompt_token_ids'] == [0]: raise ValueError('no such thing')")
    failed, run = outcome.events[3:5]
    assert failed["error"] == "ValueError: no such thing"
    assert run["workload"] == "two"
    assert outcome.error is None


def test_too_few_tokens_are_a_failure(tmp_path):
    outcome = run_fake(tmp_path, body="request = dict(request, max_tokens=2)")
    assert "got 2 tokens instead of 3" in outcome.events[3]["error"]


def test_a_crash_gives_the_last_error_line(tmp_path):
    body = "assert request['prompt_token_ids'] == [1] or sys.exit('MemoryError: no room')"
    outcome = run_fake(tmp_path, body=body)
    assert outcome.error == "MemoryError: no room"
    assert outcome.events[-1]["event"] == "settled"


def test_a_hanging_engine_is_stopped(tmp_path):
    outcome = run_fake(tmp_path, body="__import__('time').sleep(60)", timeout=1.0)
    assert outcome.error == "stopped after 1 s."


def test_an_engine_that_dies_before_its_job_is_reported(tmp_path):
    outcome = run_process([sys.executable, "-c", "import no_such_engine"], JOB, tmp_path / "log", 60.0, {}, Turns())
    assert outcome.error == "ModuleNotFoundError: No module named 'no_such_engine'"
