"""Several engine cores as one: which of them computes a request, what a call of all of them answers, who serves now.

One core passes through untouched. This module knows neither prompts' text nor results.
"""

import asyncio
from collections.abc import Sequence

from jaxpaged.core.balancer import Balancer
from jaxpaged.engine.core_calls import CoreCall, ResetPrefixCache, Sleep
from jaxpaged.engine.replica import Replica
from jaxpaged.errors import EngineDeadError, EngineError, RequestError


class Replicas:
    """All cores of an engine, in the order of their numbers. `block_size`: of what they cache; 0 if they do not."""

    def __init__(self, replicas: Sequence[Replica], block_size: int):
        self.all = tuple(replicas)
        self._balancer = Balancer(len(self.all), block_size)
        self._num_losses = [0] * len(self.all)  # of each core, when it was last looked at

    def open(self) -> None:
        """Connect in the event loop that runs. Raises UsageError when another one uses this engine."""
        for replica in self.all:
            replica.link.open()

    async def until_ready(self, rank: int | None = None) -> None:
        """Wait until some core serves, or the one that is asked for. Raises RequestError for a core that is none, and
        EngineDeadError when there will be none."""
        if rank is not None and not 0 <= rank < len(self.all):
            raise RequestError(
                f"data_parallel_rank is {rank}, but this engine has {len(self.all)} cores: 0 to {len(self.all) - 1}.",
                "data_parallel_rank",
            )
        self.open()
        wanted = self.all if rank is None else self.all[rank : rank + 1]
        while not any(replica.link.is_ready for replica in wanted):
            alive = [replica for replica in wanted if not replica.link.is_dead] or wanted[:1]
            if len(alive) == 1:
                await alive[0].link.until_ready()
                return
            tasks = [asyncio.ensure_future(replica.link.until_ready()) for replica in alive]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def choose(self, token_ids: Sequence[int], cache_salt: str | None, rank: int | None = None) -> Replica:
        """The core that is to compute all sequences of a prompt: `rank`, or the one that suits it best."""
        if len(self.all) == 1:
            return self.all[0]
        for number, replica in enumerate(self.all):
            if replica.link.num_restarts != self._num_losses[number]:
                self._num_losses[number] = replica.link.num_restarts
                self._balancer.forget(number)
        if rank is not None:
            self._balancer.give(rank, token_ids, cache_salt)
            return self.all[rank]
        loads = [replica.load for replica in self.all]
        return self.all[self._balancer.choose(token_ids, cache_salt, loads)]

    async def call[R](self, call: CoreCall[R]) -> R:
        """What the core answers, or all of them together (`CoreCall.merged`). The others have answered by the time that
        an error of one is raised; a core that is gone does not keep them from telling how they are."""
        if len(self.all) == 1:
            return await self.all[0].call(call)
        if isinstance(call, ResetPrefixCache | Sleep):
            for replica in self.all:
                self._balancer.forget(replica.number)
        self.open()
        asked = [replica for replica in self.all if replica.link.is_ready] if call.only_tells else []
        asked = asked or [replica for replica in self.all if not replica.link.is_dead] or list(self.all)
        answers = await asyncio.gather(
            *(replica.call(call.for_core(replica.number)) for replica in asked), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        told = [answer for answer in answers if not isinstance(answer, BaseException)]
        for error in errors:
            if not (told and call.only_tells and isinstance(error, EngineError)):
                raise error
        return call.merged(told)

    # ---- how they are

    def trouble(self) -> str | None:
        """Why the engine does not serve now, or not with all its cores for good; None when it does."""
        troubles = [replica.link.trouble() for replica in self.all]
        for replica, trouble in zip(self.all, troubles, strict=True):
            if replica.link.is_dead and trouble is not None:
                return trouble
        return None if None in troubles else troubles[0]

    @property
    def is_dead(self) -> bool:
        """Whether a core is gone for good: what is left serves on, and cannot be made whole."""
        return any(replica.link.is_dead for replica in self.all)

    def obstacle(self, when_compiled: bool) -> str | None:
        """Why no core would serve an ordinary request at full speed; None when one would."""
        obstacles = [replica.obstacle(when_compiled) for replica in self.all]
        return None if None in obstacles else obstacles[0]

    @property
    def sleep_level(self) -> int | None:
        """How deep all of them sleep, at least; None while one is awake."""
        levels = [replica.sleep_level for replica in self.all]
        return None if None in levels else min(level for level in levels if level is not None)

    def check_health(self) -> None:
        """Raises EngineDeadError while no core serves, and once one is dead."""
        self.open()
        if (reason := self.trouble()) is not None:
            raise EngineDeadError(f"the engine core does not serve: {reason}.")
