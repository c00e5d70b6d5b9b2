"""Requests that come together begin a few at a time, in their order, and one that comes alone waits for nothing."""

import asyncio

from jaxpaged.serving.admission import Pace


def test_a_few_begin_in_a_round_of_the_loop_in_the_order_in_which_they_came():
    async def scenario():
        pace, begun = Pace(3), []

        async def begin(number):
            await pace.turn()
            begun.append(number)

        tasks = [asyncio.ensure_future(begin(number)) for number in range(10)]
        counts = []
        while len(begun) < 10:
            await asyncio.sleep(0)
            counts.append(len(begun))
        await asyncio.gather(*tasks)
        return begun, counts

    begun, counts = asyncio.run(scenario())
    assert begun == list(range(10))
    assert max(after - before for before, after in zip([0, *counts], counts)) == 3


def test_who_leaves_takes_nobodys_turn_and_later_ones_do_not_wait():
    async def scenario():
        pace = Pace(1)
        await pace.turn()
        left, waits = asyncio.ensure_future(pace.turn()), asyncio.ensure_future(pace.turn())
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait_for(waits, 5)
        for _ in range(3):
            await asyncio.sleep(0)
        alone = pace.turn()
        try:
            alone.send(None)
        except StopIteration:
            return True

    assert asyncio.run(scenario())


def test_after_a_round_that_other_work_made_long_more_begin():
    async def scenario():
        loop, pace, begun = asyncio.get_running_loop(), Pace(2), []
        now = loop.time()
        loop.time = lambda: now

        async def begin(number):
            await pace.turn()
            begun.append(number)

        tasks = [asyncio.ensure_future(begin(number)) for number in range(20)]
        await asyncio.sleep(0)
        now += 0.0095  # what else the loop did, at a thousand beginnings a second
        first = len(begun)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = len(begun) - first
        await asyncio.gather(*tasks)
        return first, second

    assert asyncio.run(scenario()) == (2, 9)
