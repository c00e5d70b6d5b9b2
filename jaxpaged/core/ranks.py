"""Several schedulers as one: attention ranks, each with requests, a budget of tokens and KV blocks of its own, whose
steps are computed together.

A request belongs to one rank from its arrival to its end. That rank has little to do, or has cached how the prompt
begins (`balancer.py`). Every rank schedules its own part of each step, and takes its own part of what comes back; one
without requests takes part with nothing. This module decides nothing else.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from jaxpaged.core.balancer import Balancer, Load
from jaxpaged.core.kv_cache.block_map import map_blocks
from jaxpaged.core.new_tokens import Run, is_long
from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    KVBlockMap,
    ModelRunnerOutput,
    SampledLogprobs,
    SchedulerOutput,
    SchedulerStats,
)

SUMMED = (
    "num_running_reqs",
    "num_waiting_reqs",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_corrupted_reqs",
    "num_scheduled_tokens",
)
"""Of the statistics, those that are sums over ranks."""


class RankedScheduler:
    """What the engine core asks of a `Scheduler`, asked of one for each rank. `make` makes them, all alike."""

    def __init__(self, make: Callable[[], Scheduler], num_ranks: int):
        self.ranks = [make() for _ in range(num_ranks)]
        self.constrained = self.ranks[0].constrained  # which makes the masks of a whole step
        block_size = self.ranks[0].kv_cache_manager.groups.unit
        caches = self.ranks[0].kv_cache_manager.enable_prefix_caching
        self._balancer = Balancer(num_ranks, block_size if caches else 0)
        self.kv_cache_manager = RankedCaches(self.ranks, self._balancer)
        self.preparation = RankedPreparation(self.ranks)
        self.requests: Mapping[str, Request] = ChainMap(*[each.requests for each in self.ranks])

    @property
    def running(self) -> list[Request]:
        return [request for each in self.ranks for request in each.running]

    @property
    def waiting(self) -> Iterable[Request]:
        return chain.from_iterable(each.waiting for each in self.ranks)

    def add_request(self, message: EngineCoreRequest) -> None:
        """See `Scheduler.add_request`."""
        owners = [each for each in self.ranks if message.request_id in each.requests]
        (owners[0] if owners else self._rank_for(message)).add_request(message)

    def _rank_for(self, message: EngineCoreRequest) -> Scheduler:
        loads = [Load(len(each.running), len(each.waiting) + len(each.preparation.requests)) for each in self.ranks]
        return self.ranks[self._balancer.choose(message.prompt_token_ids, message.cache_salt, loads)]

    def admit_prepared(self) -> list[EngineCoreOutput]:
        return [output for each in self.ranks for output in each.admit_prepared()]

    def get_num_unfinished_requests(self) -> int:
        return sum(each.get_num_unfinished_requests() for each in self.ranks)

    def schedule(self, max_steps: int = 1, max_tokens: int = 1 << 30) -> SchedulerOutput:
        """A step of all ranks, or a run of all: one without requests, or whose requests end earlier, takes part with
        nothing to its end. `max_tokens` is for each of them."""
        runs = self._find_runs(max_steps)
        if any(map(is_long, runs)):
            return joined([each.schedule_run(run) for each, run in zip(self.ranks, runs, strict=True)])
        return joined([each.schedule_step(max_tokens) for each in self.ranks])

    def _find_runs(self, max_steps: int) -> list[Run]:
        """What a run of all ranks would be for each; none where somebody on any of them is in its way."""
        runs = []
        for each in self.ranks:
            run = each.find_run(max_steps)
            if run is None:
                return []
            runs.append(run)
        return runs

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineCoreOutput]:
        parts = zip(self.ranks, scheduled.ranks, divided(output, scheduled.ranks), strict=True)
        return [result for each, part, own in parts for result in each.update_from_output(part, own)]

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        ids = list(request_ids)
        return [output for each in self.ranks for output in each.abort_requests(ids)]

    def fail_requests(self, failed: Iterable[str] | SchedulerOutput, reason: str) -> list[EngineCoreOutput]:
        whose = failed if isinstance(failed, SchedulerOutput) else list(failed)
        return [output for each in self.ranks for output in each.fail_requests(whose, reason)]

    def preempt_all(self) -> None:
        for each in self.ranks:
            each.preempt_all()

    def forget_steps(self) -> None:
        for each in self.ranks:
            each.forget_steps()

    def reset_prefix_cache(self) -> bool:
        """False, and nothing changed, while a request of any rank holds blocks."""
        if any(each.kv_cache_manager.usage for each in self.ranks):
            return False
        self.kv_cache_manager.forget_beginnings()
        return sum(each.reset_prefix_cache() for each in self.ranks) == len(self.ranks)

    def make_stats(self, step: SchedulerOutput | None = None) -> SchedulerStats:
        """Of all ranks together."""
        parts = step.ranks if step is not None else [None] * len(self.ranks)
        of_ranks = [each.make_stats(part) for each, part in zip(self.ranks, parts, strict=True)]
        stats = of_ranks[0]
        for name in SUMMED:
            setattr(stats, name, sum(getattr(each, name) for each in of_ranks))
        stats.kv_cache_usage = sum(each.kv_cache_usage for each in of_ranks) / len(of_ranks)
        return stats

    def check_integrity(self) -> None:
        """Assert that every rank's books are whole, and that they are at the same step."""
        assert len(set(self.requests)) == self.get_num_unfinished_requests()
        for each in self.ranks:
            each.check_integrity()


AnyScheduler = Scheduler | RankedScheduler


def scheduler_of(num_ranks: int, *args: Any, **options: Any) -> AnyScheduler:
    """What schedules for an engine core: `args` and `options` are those of a `Scheduler`. Raises ConfigError."""
    make = partial(Scheduler, *args, **options)
    return make() if num_ranks == 1 else RankedScheduler(make, num_ranks)


def ranks_of(scheduler: AnyScheduler) -> Sequence[Scheduler]:
    """The scheduler of each rank."""
    return scheduler.ranks if isinstance(scheduler, RankedScheduler) else (scheduler,)


class RankedCaches:
    """The KV caches of all ranks, for whoever asks something of all of them."""

    transfers = None
    records_events = False

    def __init__(self, ranks: Sequence[Scheduler], balancer: Balancer):
        self._ranks, self._balancer = ranks, balancer
        self.groups = ranks[0].kv_cache_manager.groups
        self.pools = [pool for each in ranks for pool in each.kv_cache_manager.pools]

    def lose_content(self) -> None:
        self.forget_beginnings()
        for each in self._ranks:
            each.kv_cache_manager.lose_content()

    def change_root(self, weights_version: str, requests: Iterable[Request]) -> None:
        self.forget_beginnings()
        for each in self._ranks:
            each.kv_cache_manager.change_root(weights_version, each.requests.values())

    def forget_beginnings(self) -> None:
        """Of prompts: no rank has any."""
        for rank in range(len(self._ranks)):
            self._balancer.forget(rank)

    def block_map(self, running: Sequence[Request], most: int | None = None) -> KVBlockMap:
        """The blocks of one rank after those of another."""
        return map_blocks([(each.kv_cache_manager, each.running) for each in self._ranks], most)


class RankedPreparation:
    """The requests of all ranks that cannot be queued yet."""

    def __init__(self, ranks: Sequence[Scheduler]):
        self._ranks = ranks

    @property
    def requests(self) -> Iterator[Request]:
        return chain.from_iterable(each.preparation.requests for each in self._ranks)

    def wait(self, seconds: float) -> None:
        """Sleep as the first rank in which somebody waits does."""
        for each in self._ranks:
            if each.preparation.requests:
                each.preparation.wait(seconds)
                return


def joined(parts: list[SchedulerOutput]) -> SchedulerOutput:
    """The step whose parts the ranks compute."""
    step_id = parts[0].step_id
    assert all(part.step_id == step_id for part in parts), "ranks are at different steps"
    together = lambda name: [value for part in parts for value in getattr(part, name)]
    return SchedulerOutput(
        step_id,
        together("new_requests"),
        together("removed_request_ids"),
        together("request_ids"),
        together("num_scheduled_tokens"),
        together("num_computed_tokens"),
        together("max_sampled_tokens"),
        together("new_block_ids"),
        sum(part.total_num_scheduled_tokens for part in parts),
        num_steps=max(part.num_steps for part in parts),
        masked=any(part.masked for part in parts),
        ranks=parts,
    )


def divided(output: ModelRunnerOutput, parts: Sequence[SchedulerOutput]) -> Iterator[ModelRunnerOutput]:
    """Each rank's part of what came of a step. Requests come in the order of the ranks, and of their parts."""
    first = first_line = 0
    for part in parts:
        own = set(part.request_ids).union(request.request_id for request in part.new_requests)
        end = first
        while end < len(output.request_ids) and output.request_ids[end] in own:
            end += 1
        tokens = output.sampled_token_ids[first:end]
        end_line = first_line + sum(map(len, tokens))
        yield ModelRunnerOutput(
            output.step_id,
            output.request_ids[first:end],
            tokens,
            logprobs=lines_of(output.logprobs, first_line, end_line),
            prompt_logprobs={name: value for name, value in output.prompt_logprobs.items() if name in own},
            failed={name: reason for name, reason in output.failed.items() if name in own},
            corrupted=[name for name in output.corrupted if name in own],
            pooled=None if output.pooled is None else output.pooled[first:end],
        )
        first, first_line = end, end_line


def lines_of(logprobs: SampledLogprobs | None, first: int, end: int) -> SampledLogprobs | None:
    """Of some of the tokens of a step."""
    if logprobs is None:
        return None
    return SampledLogprobs(logprobs.token_ids[first:end], logprobs.logprobs[first:end], logprobs.ranks[first:end])
