"""Turns are shared: whoever asks for much waits for its own, and nobody else does."""

import asyncio
import random

from jaxpaged.engine.input.fair_turns import FairTurns


class Askers:
    """Clients of turns, by name; `order` is who got a turn, in order."""

    def __init__(self, num_places=4, most_each=2):
        self.turns, self.order, self.tasks = FairTurns(num_places, most_each), [], []

    async def ask(self, client, count=1):
        async def one():
            await self.turns.take(client)
            self.order.append(client)

        self.tasks += [asyncio.ensure_future(one()) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def give_back(self, client, cost=1.0):
        self.turns.give_back(client, cost=cost)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_one_client_never_holds_every_place_so_another_is_served_at_once():
    async def scenario():
        askers = Askers()
        await askers.ask("bad", 8)
        assert askers.order == ["bad", "bad"]
        await askers.ask("good")
        assert askers.order == ["bad", "bad", "good"]
        for _ in range(8):
            await askers.give_back("bad")
        await askers.give_back("good")
        assert askers.order.count("bad") == 8 and len(askers.turns) == 0

    asyncio.run(scenario())


def test_when_many_hold_all_places_who_comes_new_gets_the_next_one():
    async def scenario():
        askers = Askers()
        for name in "abcd":
            await askers.ask(name, 8)
        assert askers.order == ["a", "a", "b", "b"]
        await askers.ask("good")
        await askers.give_back("a", 5.0)
        assert askers.order[4:] == ["c"]  # it waits longer and has used as little
        await askers.give_back("b", 5.0)
        await askers.give_back("a", 5.0)
        assert sorted(askers.order[5:]) == ["d", "good"]
        for each in askers.tasks:
            each.cancel()

    asyncio.run(scenario())


def test_who_used_less_goes_first():
    async def scenario():
        askers = Askers(num_places=1)
        await askers.ask("dear", 3)
        await askers.ask("cheap", 3)
        await askers.give_back("dear", 5.0)
        for _ in range(3):
            assert askers.order[-1] == "cheap"
            await askers.give_back("cheap", 0.1)
        assert askers.order == ["dear", "cheap", "cheap", "cheap", "dear"]
        for each in askers.tasks:
            each.cancel()

    asyncio.run(scenario())


def test_whatever_is_asked_given_back_and_cancelled_places_are_never_lost_nor_exceeded():
    async def scenario(seed):
        draw, askers = random.Random(seed), Askers(3, 2)
        held = []
        for _ in range(300):
            before = len(askers.order)
            choice = draw.choice(["ask", "ask", "give", "cancel"])
            if choice == "ask":
                await askers.ask(draw.choice("abcde"))
            elif choice == "give" and held:
                await askers.give_back(held.pop(draw.randrange(len(held))), draw.random())
            elif choice == "cancel" and askers.tasks:
                draw.choice(askers.tasks).cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            held += askers.order[before:]
            assert len(held) <= 3 and all(held.count(each) <= 2 for each in held)
            waiting = [each for each in askers.tasks if not each.done()]
            assert (
                len(held) == 3 or not waiting or all(held.count(each.client[0]) == 2 for each in askers.turns._waiting)
            )
        while held:
            before = len(askers.order)
            await askers.give_back(held.pop(), 0.0)
            held += askers.order[before:]
        assert len(askers.turns) == 0 and not askers.turns._running and not askers.turns._used

    for seed in range(20):
        asyncio.run(scenario(seed))


def test_a_turn_that_comes_together_with_a_cancellation_is_given_on():
    async def scenario():
        turns = FairTurns(1, 1)
        await turns.take("a")
        waiting = asyncio.ensure_future(turns.take("b"))
        await asyncio.sleep(0)
        turns.give_back("a", cost=1.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(turns.take("c"), 5)
        assert len(turns) == 1

    asyncio.run(scenario())


def test_the_users_of_a_client_share_its_turns_and_the_smallest_goes_first():
    async def scenario():
        turns, order = FairTurns(1, 1), []

        async def one(user, size):
            await turns.take("proxy", user, size)
            order.append((user, size))

        await turns.take("proxy", "busy")
        asked = [("busy", 1), ("busy", 2), ("big", 9), ("small", 3)]
        waiting = [asyncio.ensure_future(one(*each)) for each in asked]
        await asyncio.sleep(0)
        for user in ("busy", "small", "big", "busy", "busy"):
            turns.give_back("proxy", user, cost=1.0 if user == "busy" else 0.5)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)
        assert order == [("small", 3), ("big", 9), ("busy", 1), ("busy", 2)] and len(turns) == 0

    asyncio.run(scenario())


def test_many_names_of_users_take_nothing_from_another_client():
    async def scenario():
        turns, order = FairTurns(1, 1), []

        async def one(client, user):
            await turns.take(client, user)
            order.append(client)

        await turns.take("bad", "u")
        waiting = [asyncio.ensure_future(one("bad", str(i))) for i in range(8)]
        waiting.append(asyncio.ensure_future(one("good", "")))
        await asyncio.sleep(0)
        turns.give_back("bad", "u", cost=1.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["good"]
        for each in waiting:
            each.cancel()

    asyncio.run(scenario())
