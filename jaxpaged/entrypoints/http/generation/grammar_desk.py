"""Where the shapes that requests ask for are checked before the engine hears of them: in turns, fair to all clients.

A client has at most half of the places at a time, and those who have used less computing go first, so that one who
sends grammars that take long waits for its own. What was found out is remembered by the checker, for the engine too.
This module knows no grammar.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from jaxpaged.engine.input.fair_turns import FairTurns
from jaxpaged.engine.input.grammar_checker import MOST_CHILDREN, GrammarChecker, GrammarRefused
from jaxpaged.structured_outputs import StructuredOutputsParams


class GrammarDesk:
    """For one event loop."""

    def __init__(self, checker: GrammarChecker):
        self._checker = checker
        self._turns = FairTurns(MOST_CHILDREN, MOST_CHILDREN // 2)
        self._threads = ThreadPoolExecutor(MOST_CHILDREN, thread_name_prefix="grammar-desk")

    async def check(self, shape: StructuredOutputsParams | None, client: str) -> None:
        """Raise RequestError when a shape cannot be used. One that is known is not waited for."""
        if shape is None:
            return
        if self._checker.is_known(shape):
            self._checker.check(shape)
            return
        await self._turns.take(client)
        checking = asyncio.get_running_loop().run_in_executor(self._threads, self._checker.check, shape)
        # A client that leaves does not end the computing, so its turn lasts as long as that.
        checking.add_done_callback(lambda done: self._turns.give_back(client, cost_of(done)))
        await asyncio.shield(checking)


def cost_of(done: "asyncio.Future[float]") -> float:
    """Seconds of computing that a check took."""
    error = done.exception()
    if error is None:
        return done.result()
    return error.seconds if isinstance(error, GrammarRefused) else 0.0
