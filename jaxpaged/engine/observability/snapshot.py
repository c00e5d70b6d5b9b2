"""What an engine core does at one moment, for people to watch: queues, blocks and steps, at most a screen of them.

It is taken between two steps, so it must be short. It says how long it took. This module knows no text.
"""

import itertools
import time

from jaxpaged.core.request import Request
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.engine.observability.step_log import StepLog
from jaxpaged.executor.base import Executor
from jaxpaged.messages import EngineSnapshot, RequestState, SchedulerStats

MOST_STEPS = 256
MOST_BLOCKS = 4096
"""Of a larger cache, evenly spaced blocks are shown."""
MOST_REQUESTS = 64


def take_snapshot(
    scheduler: Scheduler, step_log: StepLog, executor: Executor, stats: SchedulerStats, since_step: int
) -> EngineSnapshot:
    """The state of all these now. `since_step`: how many steps since the start need not be told again."""
    begin = time.thread_time()
    steps, num_before = step_log.read(since_step, MOST_STEPS)
    transfers = scheduler.transfers
    waiting = itertools.chain(scheduler.structured_output_manager.waiting, scheduler.waiting)
    return EngineSnapshot(
        stats=stats,
        executor=executor.workers.stats(),
        steps=steps,
        num_steps_before=num_before,
        blocks=scheduler.block_map(MOST_BLOCKS),
        num_blocks=sum(pool.num_usable_blocks for rank in scheduler.ranks for pool in rank.kv_cache_manager.pools),
        running=[state_of(request) for request in scheduler.running[:MOST_REQUESTS]],
        waiting=[
            state_of(request, transfers is not None and request.request_id in transfers.loading)
            for request in itertools.islice(waiting, MOST_REQUESTS)
        ],
        seconds=time.thread_time() - begin,
    )


def state_of(request: Request, is_loading: bool = False) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        arrival_time=request.arrival_time,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_tokens - request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        loaded=request.loaded or {},
        is_loading=is_loading,
        pictures=[feature.key for feature in request.mm_features],
    )
