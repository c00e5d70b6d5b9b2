"""Rates are those of computing: waiting for a program to be compiled is told apart."""

import time

from jaxpaged.engine.observability.step_times import ProgramWaits
from jaxpaged.entrypoints.cli.results import request_lines
from jaxpaged.messages import CompletionOutput, RequestMetrics, RequestOutput
from tests.tools.pictures.records import record


def output(arrival, first, finished):
    return RequestOutput(
        request_id="0",
        prompt="",
        prompt_token_ids=[1] * 50,
        prompt_logprobs=None,
        outputs=[CompletionOutput(index=0, text="", token_ids=[1] * 21, cumulative_logprob=None, logprobs=None)],
        finished=True,
        metrics=RequestMetrics(arrival, first, finished),
        num_cached_tokens=0,
    )


def test_rates_leave_out_what_was_spent_waiting_for_programs():
    clock, now = time.perf_counter(), time.time()
    # A step that waits 100 s for its program, 1 s after the start, and one that waits 3 s while tokens come.
    waits = ProgramWaits(
        [
            record(begin=clock, schedule_end=clock + 1, program_wait=100.0),
            record(begin=clock + 106, schedule_end=clock + 107, program_wait=3.0),
        ]
    )
    lines = dict(request_lines([output(now, now + 106, now + 119)], now, now + 119, waits))
    assert lines["requests"] == "1 in 119.00 s, 103.00 s of it waiting for programs to be compiled, 0 preemptions"
    assert lines["prefill"] == "50 tokens, 8 tokens/s" and lines["decode"] == "20 tokens, 2 tokens/s"


def test_without_waiting_nothing_is_said_of_it():
    now = time.time()
    lines = dict(request_lines([output(now, now + 5, now + 15)], now, now + 15, ProgramWaits([record()])))
    assert lines["requests"] == "1 in 15.00 s, 0 preemptions" and lines["prefill"] == "50 tokens, 10 tokens/s"


def test_only_the_part_of_a_wait_that_lies_between_counts():
    offset = time.time() - time.perf_counter()
    waits = ProgramWaits([record(schedule_end=10 - offset, program_wait=4.0)])
    assert [round(waits.between(*span), 3) for span in ((0, 100), (11, 12), (12, 100), (0, 9), (13.5, 20))] == [
        4,
        1,
        2,
        0,
        0.5,
    ]
