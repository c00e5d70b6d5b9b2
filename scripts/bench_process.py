"""What it costs to have the engine core in a process of its own: the same requests in one process and in two.

    python scripts/bench_process.py [--streams 64] [--tokens 200] [--step-ms 0] [--rounds 5] [--kind delta]
    python scripts/bench_process.py --cores 1,2,4 ...      # one front end before so many engine cores

Scheduler, detokenizer and the embedded model's tokenizer are real; the model counts, and a step takes `--step-ms` in
which the processor is free, as while a device computes. "One process" steps an `LLMEngine`, "two" reads `AsyncLLM`
streams, a coroutine each. Rounds alternate, and the medians are printed: tokens per second, and CPU time per token in
the process of the front end and in that of the core. With a step of 0 ms the core is ahead of the front end, and
several tokens arrive as one result; how many results there were is printed too.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jaxpaged
from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.front_end import front_end
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.engine.process.wire import CoreFacts, Reports
from jaxpaged.kv_cache_spec import AttentionSpec, EncoderCacheConfig, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams

DEMO = Path(jaxpaged.__file__).parent / "assets" / "demo"
VOCAB_SIZE = 4096
PROMPT = {"prompt_token_ids": list(range(300, 340))}
MAX_MODEL_LEN = 4096
FACTORY, SEEING_FACTORY = "bench_process:build", "bench_process:build_seeing"


@dataclass
class Computing:
    """A step that is ready at a time of `time.perf_counter`."""

    output: ModelRunnerOutput
    ready: float

    def result(self) -> ModelRunnerOutput:
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return self.output


class CountingExecutor:
    """A device that computes steps one after the other, `seconds` each."""

    weights_version = ""

    def __init__(self, seconds: float, num_streams: int):
        self.seconds, self.ready = seconds, 0.0
        blocks = num_streams * MAX_MODEL_LEN // 16 + 1
        self.kv_cache_config = KVCacheConfig((blocks,), (KVCacheGroup(AttentionSpec(16, 1, 1, 2), (0,)),))
        self.encoder_cache_config: EncoderCacheConfig | None = None

    def execute_model(self, scheduled: SchedulerOutput) -> Computing:
        self.ready = max(self.ready, time.perf_counter()) + self.seconds
        rows = zip(scheduled.request_ids, scheduled.num_computed_tokens, scheduled.max_sampled_tokens, strict=True)
        sampled = [(request_id, 300 + computed % 1000) for request_id, computed, most in rows if most]
        ids, tokens = [request_id for request_id, _ in sampled], [[token] for _, token in sampled]
        return Computing(ModelRunnerOutput(scheduled.step_id, ids, tokens), self.ready)

    def max_step_tokens(self) -> int:
        return 1 << 30

    def max_decode_steps(self) -> int:
        return 1

    def can_run(self, extra: Any) -> bool:
        return True

    def recover(self) -> None:
        self.ready = 0.0

    def wait_for_programs(self) -> None:
        pass

    @property
    def workers(self) -> "CountingExecutor":
        return self

    def stats(self) -> dict[str, Any]:
        return {"cpu_seconds": time.process_time()}

    def shutdown(self) -> None:
        pass


def build(config: EngineConfig, reports: Reports) -> EngineCore:
    """A `core_process.Factory`. The length of a step is on its way in an option that nothing else here reads."""
    facts = ModelFacts(max_position_embeddings=MAX_MODEL_LEN, dtype="float32", num_heads=1, vocab_size=VOCAB_SIZE)
    config = config.resolve(facts, "cpu")
    reports.announce(CoreFacts(config.options(), VOCAB_SIZE, str(DEMO), str(DEMO)))
    return EngineCore(config, CountingExecutor(config.model.seed / 1e6, config.scheduler.max_num_seqs))


def build_seeing(config: EngineConfig, reports: Reports) -> EngineCore:
    """The same for a model that sees, whose folder the options name."""
    facts = ModelFacts(max_position_embeddings=MAX_MODEL_LEN, dtype="float32", num_heads=1, vocab_size=VOCAB_SIZE)
    folder, config = str(config.model.model), config.resolve(facts, "cpu")
    reports.announce(CoreFacts(config.options(), VOCAB_SIZE, folder, folder))
    executor = CountingExecutor(config.model.seed / 1e6, config.scheduler.max_num_seqs)
    executor.encoder_cache_config = EncoderCacheConfig(num_pages=64, page_size=256, max_step_embeds=2048)
    return EngineCore(config, executor)


def counting_config(num_streams: int, step_ms: float, num_cores: int = 1, **more: Any) -> EngineConfig:
    """Options with which `FACTORY` builds cores whose steps take `step_ms`."""
    options = {"max_num_seqs": num_streams, "max_num_batched_tokens": max(2048, num_streams), "block_size": 16, **more}
    return EngineConfig.from_options(
        **options,
        num_scheduler_steps=1,
        seed=round(step_ms * 1000),
        enable_prefix_caching=False,
        data_parallel_size=num_cores,
    )


def counting_engine(config: EngineConfig) -> LLMEngine:
    """An engine over such a core, in this process."""
    facts: list[CoreFacts] = []
    core = build(config, Reports(facts.append, lambda *_: None, print))
    return LLMEngine(*front_end(facts[0]), core)


@dataclass
class Round:
    """What one measurement gave. Seconds of CPU time are those of the front end's process, and of the core's."""

    num_tokens: int
    num_results: int
    seconds: float
    front_seconds: float
    core_seconds: float = 0.0


def in_one_process(engine: LLMEngine, num_streams: int, params: SamplingParams) -> Round:
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(num_streams):
        engine.add_request(str(number), PROMPT, params)
    num_results = 0
    while engine.has_unfinished_requests():
        num_results += len(engine.step())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Round(num_streams * params.max_tokens, num_results, seconds, cpu)


async def in_two_processes(llm: AsyncLLM, num_streams: int, params: SamplingParams) -> Round:
    async def stream(number: int) -> int:
        return len([None async for _ in llm.generate(PROMPT, params, str(number))])

    core = (await llm.executor_stats())["cpu_seconds"]
    begin, cpu = time.perf_counter(), time.process_time()
    num_results = sum(await asyncio.gather(*map(stream, range(num_streams))))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    core = (await llm.executor_stats())["cpu_seconds"] - core
    return Round(num_streams * params.max_tokens, num_results, seconds, cpu, core)


def show(name: str, rounds: list[Round]) -> float:
    """Print a line; returns tokens per second."""
    median = lambda value: statistics.median(value(each) for each in rounds)
    speed = median(lambda r: r.num_tokens / r.seconds)
    front = median(lambda r: r.front_seconds / r.num_tokens * 1e6)
    core = median(lambda r: r.core_seconds / r.num_tokens * 1e6)
    results = median(lambda r: r.num_results)
    print(
        f"{name:14} {speed:9,.0f} tokens/s, CPU us/token: {front:5.1f} front end + {core:5.1f} core, {results:,.0f} "
        f"results of {rounds[0].num_tokens:,} tokens"
    )
    return speed


def with_cores(args: argparse.Namespace, params: SamplingParams) -> None:
    """Print what one front end passes on from ever more cores; rounds of all of them alternate."""
    counts = [int(count) for count in args.cores.split(",")]
    engines = [
        AsyncLLM.from_config(counting_config(args.streams, args.step_ms, count), factory=FACTORY) for count in counts
    ]
    rounds: list[list[Round]] = [[] for _ in counts]
    with asyncio.Runner() as runner:
        for _ in range(args.rounds + 1):  # the first round warms up
            for engine, its_rounds in zip(engines, rounds, strict=True):
                its_rounds.append(runner.run(in_two_processes(engine, args.streams, params)))
    for count, engine, its_rounds in zip(counts, engines, rounds, strict=True):
        engine.shutdown()
        show(f"{count} cores", its_rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kind", choices=[kind.name.lower() for kind in RequestOutputKind], default="delta")
    parser.add_argument("--cores", help="numbers of engine cores to compare, such as 1,2,4")
    args = parser.parse_args()
    kind = RequestOutputKind[args.kind.upper()]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, output_kind=kind)
    if args.cores:
        with_cores(args, params)
        return
    config = counting_config(args.streams, args.step_ms)
    engine = counting_engine(config)
    llm = AsyncLLM.from_config(config, factory=FACTORY)
    with asyncio.Runner() as runner:
        one, two = [], []
        for _ in range(args.rounds + 1):  # the first round warms up
            one.append(in_one_process(engine, args.streams, params))
            two.append(runner.run(in_two_processes(llm, args.streams, params)))
    llm.shutdown()
    speed_one, speed_two = show("one process", one[1:]), show("two processes", two[1:])
    print(f"two processes give {speed_two / speed_one:.2f} times the tokens per second of one")


if __name__ == "__main__":
    main()
