"""What it costs to tell other processes of steps, where several compute as one: host time, and steps a second.

    python scripts/bench_group.py [--processes 1 2 4 8] [--running 1 256] [--steps 2000]

The real scheduler makes steps in which all requests decode, and the real channel, encrypted, takes each to processes
of their own on this machine, which decode it and compute nothing. So the steps a second are a limit that no model can
pass: the clock stops when the last process has heard of the last step. Host time is CPU time of the thread that drives:
to schedule a step and deal with its tokens, and on top of that to tell the others. `of a step` compares with what one
process takes for all that its host does for a step (`scripts/bench_host.py`: 110 us, and 3.2 us for each further
request).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench_scheduler import Case, add_requests, make_scheduler, output_of

from jaxpaged.executor.follower import Post
from jaxpaged.executor.group import Group
from jaxpaged.executor.group_messages import Ask, Hello, Reply, Step, Stop
from jaxpaged.messages import ProgramKey
from jaxpaged.tools.planning.roofline import DISPATCH_SECONDS, REQUEST_SECONDS

SECRET = b"of this benchmark alone"
PATIENCE = 60.0
ROUNDS = 5
HEAD = """\
| processes | requests | scheduling, us a step | telling, us a step | of a step | steps/s |
|---|---|---|---|---|---|"""


def follow(rank: int, addresses: tuple[str, str]) -> None:
    """Hear of steps until told to stop; answer whoever asks whether all were heard."""
    post = Post(rank, addresses, SECRET)
    post.say(Hello(rank, f"process {rank}", {}))
    num_heard = 0
    while not isinstance(command := post.hear(PATIENCE), Stop | None):
        if isinstance(command, Step):
            num_heard += bool(command.scheduled.request_ids)
        elif isinstance(command, Ask):
            error = None if [num_heard] == command.arguments else ("EngineError", f"{num_heard} steps were heard")
            post.say(Reply(rank, command.call_id, error))
    post.close()


class Followers:
    """Processes that hear of steps; a context."""

    def __init__(self, count: int):
        self.group = Group(count + 1, "127.0.0.1", None, SECRET, lambda *progress: None, print)
        command = [sys.executable, str(Path(__file__)), "--follow"]
        arguments = [json.dumps([rank, *self.group.addresses]) for rank in self.group.ranks]
        self.children = [subprocess.Popen([*command, argument]) for argument in arguments]

    def __enter__(self) -> Group:
        self.group.gather({}, PATIENCE)
        return self.group

    def __exit__(self, *_: object) -> None:
        self.group.close()
        for child in self.children:
            child.wait(PATIENCE)


def measure(num_processes: int, num_running: int, num_steps: int) -> str:
    with Followers(num_processes - 1) as group:
        rounds, num_told = [], 0
        for _ in range(ROUNDS):
            times, num_told = run(group, num_running, max(num_steps // ROUNDS, 1), num_told)
            rounds.append(times)
    scheduling, telling, wall = (statistics.median(column) for column in zip(*rounds))
    alone = DISPATCH_SECONDS + (num_running - 1) * REQUEST_SECONDS
    return (
        f"| {num_processes} | {num_running} | {1e6 * scheduling:.0f} | {1e6 * telling:.0f} | "
        f"{telling / alone:+.0%} | {1 / wall:,.0f} |"
    )


def run(group: Group, num_running: int, num_steps: int, num_told: int) -> tuple[tuple[float, float, float], int]:
    """Seconds of a step: to schedule it, to tell of it, and by the wall clock; and how many were told of by now."""
    case = Case(num_running, num_waiting=0, window=None, policy="fcfs", block_size=16, prompt_len=64)
    scheduler = make_scheduler(case)
    add_requests(scheduler, case, num_steps)
    scheduled, told = scheduler.schedule(), 0.0
    begin, begin_wall = time.thread_time(), time.perf_counter()
    for _ in range(num_steps):
        following = scheduler.schedule()
        following.programs = (ProgramKey("forward", 256), ProgramKey("sample", 256))
        before = time.thread_time()
        if group.ranks:
            group.tell(Step(following))
        told += time.thread_time() - before
        scheduler.update_from_output(scheduled, output_of(scheduled))
        scheduled = following
    spent = time.thread_time() - begin
    num_told += num_steps
    if group.ranks:
        group.ask("have you heard", [num_told], lambda: None)
    wall = time.perf_counter() - begin_wall
    return ((spent - told) / num_steps, told / num_steps, wall / num_steps), num_told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="the driver is one of them")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 256], help="requests that decode in a step")
    parser.add_argument("--steps", type=int, default=2000, help="that are told of")
    parser.add_argument("--follow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow is not None:
        rank, *addresses = json.loads(options.follow)
        follow(rank, tuple(addresses))
        return
    print(HEAD, flush=True)
    for num_running in options.running:
        for num_processes in options.processes:
            print(measure(num_processes, num_running, options.steps), flush=True)


if __name__ == "__main__":
    main()
