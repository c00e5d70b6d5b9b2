"""Microseconds per request and step that the scheduler takes, for running decodes and for a long queue.

    python scripts/bench_scheduler.py [--running 256] [--waiting 0 10000] [--steps 400] [--policy fcfs]

Requests decode as in the engine: a step is scheduled while the one before it is in flight. No model is involved.
Times are CPU times of the thread, so that other programs on the machine do not count. Prompt lengths differ, so
that in every step about one request in `block_size` needs a new block and enters a full one into the prefix cache.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import EngineCoreRequest, ModelRunnerOutput, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams

WARM_UP_STEPS = 20
MAX_MODEL_LEN = 8192


@dataclass
class Case:
    """One line of the table."""

    num_running: int
    num_waiting: int
    window: int | None  # of a second KV group, if there is one
    policy: str
    block_size: int
    prompt_len: int


def make_scheduler(case: Case) -> Scheduler:
    windows = (None,) if case.window is None else (None, case.window)
    groups = tuple(KVCacheGroup(AttentionSpec(case.block_size, 1, 8, 4, w), (g,)) for g, w in enumerate(windows))
    blocks_per_request = 2 * MAX_MODEL_LEN // case.block_size + 2
    return Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=max(8192, case.num_running),
            max_num_seqs=case.num_running,
            scheduling_policy=case.policy,
        ),
        KVCacheConfig((1 + case.num_running * blocks_per_request // 4,), groups),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=True,
    )


def add_requests(scheduler: Scheduler, case: Case, steps: int) -> float:
    """Queue all requests; returns microseconds per request."""
    params = SamplingParams(max_tokens=2 * steps + 4 * WARM_UP_STEPS, stop_token_ids=[1, 2])
    num_requests = case.num_running + case.num_waiting
    prompts = [
        [(i * 7919 + j) % 50000 + 10 for j in range(case.prompt_len + i % case.block_size)] for i in range(num_requests)
    ]
    start = time.thread_time()
    for i, prompt in enumerate(prompts):
        scheduler.add_request(EngineCoreRequest(f"request-{i}", prompt, params, arrival_time=float(i)))
    return (time.thread_time() - start) / num_requests * 1e6


def output_of(scheduled: SchedulerOutput) -> ModelRunnerOutput:
    sampled = [request_id for request_id, most in zip(scheduled.request_ids, scheduled.max_sampled_tokens) if most]
    return ModelRunnerOutput(scheduled.step_id, sampled, [[1000] for _ in sampled])


def step_times(scheduler: Scheduler, num_running: int, steps: int) -> Iterator[tuple[float, float]]:
    """Seconds of `schedule` and of `update_from_output` of steps in which everybody decodes."""
    scheduled, warm = scheduler.schedule(), 0
    while warm < WARM_UP_STEPS + steps:
        start = time.thread_time()
        following = scheduler.schedule()
        middle = time.thread_time()
        output = output_of(scheduled)
        before_update = time.thread_time()
        scheduler.update_from_output(scheduled, output)
        end = time.thread_time()
        scheduled = following
        if following.total_num_scheduled_tokens == num_running and len(following.request_ids) == num_running:
            warm += 1
            if warm > WARM_UP_STEPS:
                yield middle - start, end - before_update


def measure(case: Case, steps: int) -> str:
    scheduler = make_scheduler(case)
    intake = add_requests(scheduler, case, steps)
    gc.collect()
    times = list(step_times(scheduler, case.num_running, steps))
    schedule, update = (1e6 * statistics.fmean(column) / case.num_running for column in zip(*times))
    median = 1e6 * statistics.median(map(sum, times))
    worst = 1e6 * max(map(sum, times))
    return (
        f"{case.policy:>8} {case.num_running:>8} {case.num_waiting:>8} {case.window or '-':>7} {intake:>8.2f} "
        f"{schedule:>9.3f} {update:>8.3f} {schedule + update:>7.3f} {median:>12.0f} {worst:>11.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000], help="lengths of the queue")
    parser.add_argument("--steps", type=int, default=400, help="decode steps that are timed")
    parser.add_argument("--policy", choices=("fcfs", "priority"), nargs="+", default=["fcfs", "priority"])
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens per prompt")
    args = parser.parse_args()
    print("microseconds   -- a request --            ---- a request and step ---  ----- a step -------")
    print("  policy  running  waiting  window   intake  schedule   update    both       median       worst")
    for policy in args.policy:
        for window in (None, 128):
            for num_waiting in args.waiting:
                case = Case(args.running, num_waiting, window, policy, args.block_size, args.prompt_len)
                print(measure(case, args.steps), flush=True)


if __name__ == "__main__":
    main()
