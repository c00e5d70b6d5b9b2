"""The loop that sends, on a clock that jumps: every time is exact."""

import asyncio

import pytest

from jaxpaged.tools.bench.load import run_load
from jaxpaged.tools.bench.requests import BenchRequest, Outcome
from tests.tools.bench.virtual_time import run_virtually

REQUESTS = [BenchRequest(f"prompt {number}", 4, 8) for number in range(4)]


def server(clock, seconds, log=None):
    """Answers with one chunk after so many seconds, as many requests at a time as there are."""

    async def send(request, number):
        outcome = Outcome(start_time=clock())
        if log is not None:
            log.append((number, request.prompt, clock()))
        await asyncio.sleep(seconds)
        outcome.add_chunk(clock(), "x")
        return outcome

    return send


def test_requests_are_sent_when_they_are_due_however_slow_the_server_is():
    log = []
    run = run_virtually(lambda clock: run_load(server(clock, 10.0, log), REQUESTS, [0, 1, 1, 2.5], None, clock=clock))
    assert log == [(0, "prompt 0", 0.0), (1, "prompt 1", 1.0), (2, "prompt 2", 1.0), (3, "prompt 3", 2.5)]
    assert run.duration == pytest.approx(12.5) and not run.interrupted
    assert [each.queue_time for each in run.outcomes] == [0.0] * 4
    assert [each.latency for each in run.outcomes] == pytest.approx([10.0] * 4)
    assert run.send_lags == [0.0] * 4


def test_those_held_back_wait_in_order_and_their_wait_is_told_apart():
    run = run_virtually(lambda clock: run_load(server(clock, 10.0), REQUESTS, [0, 1, 2, 30], 1, clock=clock))
    assert [each.start_time for each in run.outcomes] == pytest.approx([0, 10, 20, 30])
    assert [each.queue_time for each in run.outcomes] == pytest.approx([0, 9, 18, 0])
    assert [each.latency for each in run.outcomes] == pytest.approx([10.0] * 4)


def test_at_most_so_many_are_under_way():
    under_way, most = 0, 0

    async def send(request, number):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(1 + number)
        under_way -= 1
        return Outcome()

    run_virtually(lambda clock: run_load(send, REQUESTS, [0.0] * 4, 2, clock=clock))
    assert most == 2


def test_a_blocked_client_is_told_from_a_slow_server():
    """The clock moves while nothing else can run: requests are late, and the run says by how much."""

    async def scenario(clock):
        loop = asyncio.get_running_loop()

        async def send(request, number):
            outcome = Outcome(start_time=clock())
            if number == 0:
                loop.now += 3.0  # as a long computation does
            return outcome

        return await run_load(send, REQUESTS[:3], [0, 1, 2], None, clock=clock)

    run = run_virtually(scenario)
    assert run.send_lags == pytest.approx([0, 2, 1])
    assert [each.queue_time for each in run.outcomes] == pytest.approx([0, 2, 1])


def test_an_interrupted_run_keeps_what_has_ended():
    ended = []

    async def scenario(clock):
        running = asyncio.ensure_future(
            run_load(server(clock, 10.0), REQUESTS, [0, 1, 2, 30], None, ended.append, clock=clock)
        )
        await asyncio.sleep(11.5)
        running.cancel()
        return await running

    run = run_virtually(scenario)
    assert run.interrupted and len(run.outcomes) == len(ended) == 2 and run.duration == pytest.approx(11.5)


def test_an_error_in_the_program_is_no_failed_request():
    async def send(request, number):
        raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        run_virtually(lambda clock: run_load(send, REQUESTS, [0.0] * 4, None, clock=clock))
