"""Where the shapes that requests ask for are checked before the engine hears of them: in turns, fair to all clients.

Every shape is computed for a moment first, in which ordinary ones are done: so these wait for no hard one, whoever sent
it. What takes longer goes on in turns of its own, where those who have used less computing go first. What was found out
is remembered by the checker, for the engine too. A client that leaves takes its work with it.
This module knows no grammar.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from jaxpaged.engine.input.fair_turns import FairTurns
from jaxpaged.engine.input.grammar_checker import MOST_CHILDREN, Check, GrammarChecker
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.requests import RequestContext

FIRST_SECONDS = 0.1
"""Of computing, which each shape has before the hard ones; ordinary ones take milliseconds."""
NUM_SHORT = MOST_CHILDREN // 2
NUM_HARD = MOST_CHILDREN - NUM_SHORT


class GrammarChecks:
    """For one event loop."""

    def __init__(self, checker: GrammarChecker):
        self._checker = checker
        self._short = FairTurns(NUM_SHORT, NUM_SHORT)
        self._hard = FairTurns(NUM_HARD, NUM_HARD)
        self._threads = ThreadPoolExecutor(MOST_CHILDREN, thread_name_prefix="grammar-checks")

    async def check(self, shape: StructuredOutputsParams, context: RequestContext) -> None:
        """Raise RequestError when a shape cannot be used. One that is known is not waited for."""
        if self._checker.is_known(shape):
            self._checker.check(shape)
            return
        work = self._look_at(self._checker.begin(shape), context)
        await (work if context.unless_it_leaves is None else context.unless_it_leaves(work))

    async def _look_at(self, check: Check, context: RequestContext) -> None:
        try:
            if not await self._turn(self._short, check, FIRST_SECONDS, context):
                await self._turn(self._hard, check, float("inf"), context)
        except asyncio.CancelledError:
            check.drop()
            raise

    async def _turn(self, turns: FairTurns, check: Check, seconds: float, context: RequestContext) -> bool:
        """Whether it is known after a turn."""
        await turns.take(context.client, context.user, check.size)
        before = check.seconds
        running = asyncio.get_running_loop().run_in_executor(self._threads, check.run, seconds)
        # The turn lasts as long as the computing, which ends soon after it is taken back.
        running.add_done_callback(
            lambda done: turns.give_back(context.client, context.user, cost=check.seconds - before)
        )
        return await asyncio.shield(running)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
