"""How throughput and waiting grow with the number of engine cores behind one server: simulated, with a trace.

    python scripts/simulate_replicas.py [--replicas 1 2 4 8] [--rate 8] [--trace mooncake.jsonl] [--chart x.png]

The scheduler, the KV cache manager and the balancer are the real ones; devices, clock and front end are not. A step
takes as long as `--step-ms`, `--token-us` and `--context-ns` say: what every step costs, each token that it computes,
and each token of context that a request in it has cached. The defaults are an 8B Llama in bfloat16 on an H100, by the
bytes and half of the operations a second of its data sheet. Two steps are in flight, as in the engine.

The front end is one process, so it does one thing at a time: it takes `--front-request-us` for a prompt, and
`--front-token-us` for each token that it writes. By default that is 1 ms, in which 1,300 tokens of text are tokenised,
and 19 us, from 52,000 tokens a CPU second of `scripts/bench_serving.py --device-ms 5 --streams 256`. Results of a step
leave it together. What the balancer really took for a prompt is the last column, and not part of the simulation.

Without `--trace` requests are made up: conversations that begin with one of 32 long instructions, two or three turns
each, the next with all that was said. A trace has Mooncake's format (`jaxpaged plan --kv-trace` reads it too), with its
`timestamp` in milliseconds. In both cases requests come at `--rate` a second and replica, and as many for each; where a
trace has too few it is repeated with other content. So a system that scales keeps its times from line to line.
"""

import argparse
import heapq
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_scheduler import output_of

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.balancer import Balancer, Load
from jaxpaged.core.scheduler import Scheduler
from jaxpaged.errors import JaxpagedError
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import EngineCoreRequest, SchedulerOutput
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.tools.kv_trace import BLOCK_TOKENS, TracedRequest, read_trace
from jaxpaged.tools.pictures import canvas

STEPS_IN_FLIGHT = 2
BLOCK_SIZE = 16
VOCAB = 50_000
NUM_INSTRUCTIONS = 32


class TimedRequest(TracedRequest):
    """A line of a trace, with when it comes and how long its answer is. Milliseconds."""

    timestamp: float
    output_length: int


class Prompt(NamedTuple):
    """`pieces`: (what a piece of the prompt is, its tokens); equal beginnings are equal pieces."""

    seconds: float
    pieces: tuple[tuple[Any, int], ...]
    num_out: int

    @property
    def token_ids(self) -> list[int]:
        return list(itertools.chain.from_iterable(tokens_of(*piece) for piece in self.pieces))


def tokens_of(name: Any, length: int) -> Iterator[int]:
    first = random.Random(repr(name)).randrange(VOCAB)
    return ((first + 7919 * i) % VOCAB for i in range(length))


@dataclass
class Device:
    """What a step costs, in seconds."""

    step: float
    token: float
    context: float

    def seconds(self, scheduled: SchedulerOutput) -> float:
        cached = sum(scheduled.num_computed_tokens)
        return self.step + self.token * scheduled.total_num_scheduled_tokens + self.context * cached


@dataclass
class Times:
    """Of one request, as its client sees them."""

    sent: float
    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0


class Replica:
    """A scheduler, and a device that computes one step after the other."""

    def __init__(self, options: argparse.Namespace, device: Device):
        config = SchedulerConfig(
            max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
        )
        group = KVCacheGroup(AttentionSpec(BLOCK_SIZE, 1, 8, 4, None), (0,))
        self.scheduler = Scheduler(
            config,
            KVCacheConfig((1 + options.kv_tokens // BLOCK_SIZE,), (group,)),
            max_model_len=options.max_model_len,
            enable_prefix_caching=True,
        )
        self.device, self.free_at = device, 0.0
        self.in_flight: deque[SchedulerOutput] = deque()
        self.told_running = self.told_unfinished = 0  # by what the front end heard last, and has sent since
        self.busy = 0.0

    def dispatch(self, now: float) -> Iterator[float]:
        """Schedule as many steps as may be in flight; when each of them is over."""
        while len(self.in_flight) < STEPS_IN_FLIGHT:
            scheduled = self.scheduler.schedule()
            if not scheduled.total_num_scheduled_tokens:
                return
            seconds = self.device.seconds(scheduled)
            self.free_at = max(now, self.free_at) + seconds
            self.busy += seconds
            self.in_flight.append(scheduled)
            yield self.free_at

    def finish_step(self) -> list[Any]:
        scheduled = self.in_flight.popleft()
        return self.scheduler.update_from_output(scheduled, output_of(scheduled))

    @property
    def load(self) -> Load:
        running = min(self.told_running, self.told_unfinished)
        return Load(running, self.told_unfinished - running)


@dataclass
class System:
    """Replicas behind one front end. Events are (time, number, what happens then)."""

    options: argparse.Namespace
    num_replicas: int
    events: list[tuple[float, int, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    times: dict[str, Times] = field(default_factory=dict)
    front_free_at: float = 0.0
    front_busy: float = 0.0
    balancing: float = 0.0  # real seconds

    def __post_init__(self) -> None:
        o = self.options
        device = Device(o.step_ms / 1e3, o.token_us / 1e6, o.context_ns / 1e9)
        self.replicas = [Replica(o, device) for _ in range(self.num_replicas)]
        self.balancer = Balancer(self.num_replicas, 0 if o.no_affinity else BLOCK_SIZE)

    def at(self, seconds: float, act: Any) -> None:
        heapq.heappush(self.events, (seconds, next(self.numbers), act))

    def front(self, now: float, seconds: float) -> float:
        """When the front end is done with something that takes so long and comes now."""
        self.front_free_at = max(now, self.front_free_at) + seconds
        self.front_busy += seconds
        return self.front_free_at

    def run(self, prompts: Sequence[Prompt]) -> None:
        for number, prompt in enumerate(prompts):
            self.at(prompt.seconds, lambda now, number=number, prompt=prompt: self.arrive(now, number, prompt))
        while self.events:
            now, _, act = heapq.heappop(self.events)
            act(now)

    def arrive(self, now: float, number: int, prompt: Prompt) -> None:
        name = f"r{number}"
        self.times[name] = Times(now)
        ready = self.front(now, self.options.front_request_us / 1e6)
        self.at(ready, lambda then: self.give(then, name, prompt))

    def give(self, now: float, name: str, prompt: Prompt) -> None:
        token_ids = prompt.token_ids
        begin = time.thread_time()
        chosen = self.balancer.choose(token_ids, None, [replica.load for replica in self.replicas])
        self.balancing += time.thread_time() - begin
        replica = self.replicas[chosen]
        replica.told_unfinished += 1
        params = SamplingParams(max_tokens=prompt.num_out, ignore_eos=True)
        replica.scheduler.add_request(EngineCoreRequest(name, token_ids, params, arrival_time=now))
        self.dispatch(now, replica)

    def dispatch(self, now: float, replica: Replica) -> None:
        for over in replica.dispatch(now):
            self.at(over, lambda then: self.end_step(then, replica))

    def end_step(self, now: float, replica: Replica) -> None:
        outputs = replica.finish_step()
        self.dispatch(now, replica)
        written = self.front(now, len(outputs) * self.options.front_token_us / 1e6)
        replica.told_running = len(replica.scheduler.running)
        for output in outputs:
            times = self.times[output.request_id]
            times.first = times.first or written
            times.last, times.num_tokens = written, times.num_tokens + len(output.new_token_ids)
            replica.told_unfinished -= output.finish_reason is not None


@dataclass
class Result:
    """A line of the table. Times in seconds; `hits` and `front` are shares, `evenness` the mean of what replicas
    computed over the most."""

    replicas: int
    tokens_a_second: float
    first: tuple[float, float]
    between: tuple[float, float]
    hits: float
    evenness: float
    front: float
    balancing: float

    def line(self, base: "Result") -> str:
        grown = self.tokens_a_second / base.tokens_a_second * base.replicas
        figures = (*self.first, *self.between)
        return (
            f"| {self.replicas} | {self.tokens_a_second:,.0f} | {grown:.1f} | "
            f"{' | '.join(f'{1e3 * seconds:,.0f}' for seconds in figures)} | {self.hits:.0%} | {self.evenness:.2f} | "
            f"{self.front:.0%} | {1e6 * self.balancing:.0f} |"
        )


HEAD = """\
| replicas | tokens/s | times one | first token, p50 ms | p99 | between tokens, p50 ms | p99 | from cache | evenness | \
front end busy | balancer, us |
|---|---|---|---|---|---|---|---|---|---|---|"""


def simulate(options: argparse.Namespace, num_replicas: int) -> Result:
    prompts = prompts_for(options, num_replicas)
    system = System(options, num_replicas)
    system.run(prompts)
    times = list(system.times.values())
    assert sum(each.num_tokens for each in times) == sum(prompt.num_out for prompt in prompts), "tokens were lost"
    span = max(each.last for each in times) - min(each.sent for each in times)
    first = [each.first - each.sent for each in times]
    between = [(each.last - each.first) / (each.num_tokens - 1) for each in times if each.num_tokens > 1]
    stats = [replica.scheduler.make_stats() for replica in system.replicas]
    busy = [replica.busy for replica in system.replicas]
    return Result(
        num_replicas,
        sum(each.num_tokens for each in times) / span,
        percentiles(first),
        percentiles(between or [0.0]),
        sum(each.prefix_cache_hits for each in stats) / max(sum(each.prefix_cache_queries for each in stats), 1),
        sum(busy) / num_replicas / max(busy),
        system.front_busy / span,
        system.balancing / len(prompts),
    )


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    half, most = np.percentile(values, (50, 99))
    return float(half), float(most)


def prompts_for(options: argparse.Namespace, num_replicas: int) -> list[Prompt]:
    """In order of their time: `--requests` for each replica, at `--rate` a second for each."""
    count = options.requests * num_replicas
    prompts = made_up(count) if options.trace is None else traced(options, count)
    prompts.sort(key=lambda prompt: prompt.seconds)
    span = prompts[-1].seconds - prompts[0].seconds
    scale = options.requests / options.rate / span if span else 0.0
    return [prompt._replace(seconds=(prompt.seconds - prompts[0].seconds) * scale) for prompt in prompts]


def made_up(count: int) -> list[Prompt]:
    """Conversations: an instruction that others share, and turns of which each repeats those before it."""
    draw, prompts, conversation = random.Random(0), [], 0
    while len(prompts) < count:
        conversation += 1
        instruction = draw.randrange(NUM_INSTRUCTIONS)
        pieces: list[tuple[Any, int]] = [(("instruction", instruction), 512 + 48 * instruction)]
        seconds = draw.random() * count
        for turn in range(draw.randint(2, 3)):
            pieces.append(((conversation, turn), draw.randint(20, 600)))
            num_out = min(int(draw.lognormvariate(math.log(120), 0.8)) + 1, 1000)
            prompts.append(Prompt(seconds, tuple(pieces), num_out))
            pieces.append(((conversation, turn, "answer"), num_out))
            seconds += count * draw.uniform(0.05, 0.2)
    return prompts[:count]


def traced(options: argparse.Namespace, count: int) -> list[Prompt]:
    """The first requests of a file, repeated with other content where it has too few."""
    lines = sorted(read_trace(options.trace, TimedRequest), key=lambda line: line.timestamp)
    span, prompts = lines[-1].timestamp - lines[0].timestamp + 1, []
    for number in range(count):
        again, place = divmod(number, len(lines))
        line, left, pieces = lines[place], lines[place].input_length, []
        for block in line.hash_ids:
            pieces.append(((block, again), min(left, BLOCK_TOKENS)))
            left -= BLOCK_TOKENS
        pieces = [piece for piece in pieces if piece[1] > 0]
        prompts.append(Prompt((line.timestamp + again * span) / 1e3, tuple(pieces), max(line.output_length, 1)))
    return prompts


def draw_chart(results: Sequence[Result], path: Path) -> None:
    """Throughput against what as many single ones would give, and the slow requests, by the number of replicas."""
    figure = canvas.new_figure(11, 4.5)
    figure.suptitle("simulated: replicas behind one server, as many requests a second for each", fontsize=12)
    left, right = figure.subplots(1, 2)
    counts = [result.replicas for result in results]
    speeds = [result.tokens_a_second for result in results]
    left.plot(counts, speeds, color=canvas.GREEN, marker="o", label="tokens/s")
    each = speeds[0] / counts[0]
    left.plot(counts, [each * n for n in counts], color=canvas.GREY, linestyle="--", label="as many single ones")
    for result, speed in zip(results, speeds):
        left.annotate(
            f"{result.front:.0%}",
            (result.replicas, speed),
            xytext=(4, -12),
            textcoords="offset points",
            fontsize=8,
            color=canvas.INK,
        )
    left.set_title("output tokens/s; numbers: how busy the front end is", fontsize=11, loc="left", color=canvas.INK)
    left.set_yscale("log", base=10)
    for label, color, value in (
        ("first token, P99", canvas.ORANGE, lambda result: result.first[1]),
        ("first token, median", canvas.BLUE, lambda result: result.first[0]),
        ("between tokens, P99", canvas.RED, lambda result: result.between[1]),
    ):
        right.plot(counts, [1e3 * value(result) for result in results], color=color, marker="o", label=label)
    right.set_title("ms", fontsize=11, loc="left", color=canvas.INK)
    right.set_yscale("log", base=10)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlabel("replicas", fontsize=9, color=canvas.INK)
        axes.legend(frameon=False, fontsize=9)
        canvas.plain_axes(axes)
    print(f"The picture is {canvas.write_figure(figure, path)}.")


def at_least(smallest: float, kind: type = float) -> Any:
    def number(text: str) -> Any:
        value = kind(text)
        if not smallest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not {smallest:g} or more")
        return value

    return number


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags: dict[str, tuple[Any, Any, str]] = {
        "requests": (150, at_least(1, int), "of each replica"),
        "rate": (8.0, at_least(1e-3), "requests a second that come for each replica"),
        "step-ms": (4.8, at_least(0.0), "of a step, whatever is in it"),
        "token-us": (32.0, at_least(0.0), "of a token that a step computes"),
        "context-ns": (39.0, at_least(0.0), "of a cached token that a step reads"),
        "front-request-us": (1000.0, at_least(0.0), "of the front end, for a request"),
        "front-token-us": (19.0, at_least(0.0), "of the front end, for a token that it writes"),
        "max-num-seqs": (256, at_least(1, int), "requests of a replica that run at a time"),
        "max-num-batched-tokens": (2048, at_least(1, int), "of a step"),
        "max-model-len": (131_072, at_least(2, int), "most tokens of a request"),
        "kv-tokens": (400_000, at_least(BLOCK_SIZE, int), "that the KV cache of a replica has room for"),
    }
    parser.add_argument("--replicas", type=at_least(1, int), nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    for name, (default, kind, text) in flags.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default:g})")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests in Mooncake's format, in place of made-up ones"
    )
    parser.add_argument("--no-affinity", action="store_true", help="balance by load alone")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the table (.png, .svg, .pdf)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_args()
    if options.chart is not None:
        canvas.check_picture_path(options.chart)
    print(HEAD, flush=True)
    results: list[Result] = []
    for num_replicas in sorted(set(options.replicas)):
        results.append(simulate(options, num_replicas))
        print(results[-1].line(results[0]), flush=True)
    if options.chart is not None:
        draw_chart(results, options.chart)


if __name__ == "__main__":
    try:
        main()
    except JaxpagedError as error:
        raise SystemExit(f"simulate_replicas.py: {error}") from None
