"""After work that took long there is as long none; what took no time is followed at once."""

import asyncio

import pytest

from jaxpaged.engine.process.rate_limit import LONGEST, SHORTEST, RateLimit


def rest_after(monkeypatch, seconds, cancelled=False):
    """How long a rest lasts after work of so many seconds, by a clock that only work and timers move; None: whoever
    asks is never called."""

    async def scenario():
        loop, resumed, now = asyncio.get_running_loop(), asyncio.Event(), 0.0

        def call_later(delay, function):
            nonlocal now
            now += delay
            return loop.call_soon(function)

        monkeypatch.setattr(loop, "call_later", call_later)
        rest = RateLimit(lambda: now)
        rest.begin_work()
        now += seconds / 2
        assert rest.lasts(resumed.set)
        assert rest.lasts(resumed.set)  # it is called once
        if cancelled:
            rest.cancel()
            assert not rest.lasts(resumed.set)
        now += seconds / 2
        for _ in range(6):
            await asyncio.sleep(0)
        assert not rest.lasts(resumed.set)
        return now - seconds if resumed.is_set() else None

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seconds", "expected"), [(SHORTEST / 2, 0.0), (2 * SHORTEST, 2 * SHORTEST), (3 * LONGEST, LONGEST)]
)
def test_as_long_as_the_work_took_but_for_the_very_short_and_long(monkeypatch, seconds, expected):
    assert rest_after(monkeypatch, seconds) == pytest.approx(expected)


def test_once_cancelled_it_calls_nobody(monkeypatch):
    assert rest_after(monkeypatch, 2 * SHORTEST, cancelled=True) is None
