"""Host time of one engine step, by part, with a model that costs nothing; and whether the device ever waits for it.

    python scripts/bench_host.py [--running 256] [--waiting 0] [--kind delta] [--asked stop] [--pictures] [--profile 12]
    python scripts/bench_host.py --device-ms 5 [--running 256] [--steps 400]

The real scheduler, runner, output processor and detokenizer serve the embedded model's tokenizer; only the compiled
programs are replaced, by functions that return arrays made beforehand. What is left is what the host does for every
running request in every step. Times are CPU times of the thread, so other programs on the machine do not count, and the
times of the parts include what the garbage collector takes out of them. Prompts differ in content and length, so that
in every step one request of 16 enters a new block.

With `--pictures` each prompt has a picture, in an engine with all that pictures can bring to a step: visible ends,
three positions, embeddings from the encoder cache.

With `--device-ms` the programs are those of a device that computes one step after the other, each for so long, and
whose results can be read only then. Its clock is the host's CPU time plus the time that the host waited for it, so this
too is the same on a busy machine. Printed is how long the device had nothing to do.
"""

import argparse
import cProfile
import gc
import hashlib
import itertools
import pstats
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.build import build_input_processor
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.kv_cache_spec import AttentionSpec, EncoderCacheConfig, KVCacheConfig, KVCacheGroup
from jaxpaged.messages import EngineCoreRequest, MultiModalFeature, SchedulerOutput
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params.hub import resolve_model_folder
from jaxpaged.sampling.custom import NO_PROCESSORS
from jaxpaged.sampling.logprobs import LogprobOutput
from jaxpaged.sampling.state import StateLayout
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.sampling_params.features import features_of
from jaxpaged.worker.device import Device as RealDevice
from jaxpaged.worker.device import DeviceState
from jaxpaged.worker.engine_spec import doubling_buckets
from jaxpaged.worker.model_runner import ModelRunner, PendingStep
from jaxpaged.worker.programs.choose import ProgramChoice, StepSizes
from jaxpaged.worker.programs.compile_queue import Activity
from jaxpaged.worker.request_rows import RequestRows
from jaxpaged.worker.step.packed import step_layout
from jaxpaged.worker.step.sampler import Sampler
from jaxpaged.worker.visual_rows import VisualRows

SHORTEST_PROMPT = 40
PICTURE_TOKENS = 32
MAX_MODEL_LEN = 4096
WARM_UP_STEPS = 30
NUM_CANDIDATES = 21
ASKED = {
    "nothing": {},
    "stop": {"stop": ["\n\nQuestion:", "</answer>"]},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 5},
}
"""What every request may ask for besides its tokens."""


class FreePrograms:
    """A program table whose programs cost nothing: they return arrays of the right kind made beforehand."""

    seconds_waited = 0.0  # for programs

    def __init__(self, token_id: int, device: "Device | None"):
        self.activity, self.num_workers, self.callable = Activity(shares_cores=False), 0, {}
        self.state = jax.device_put(np.zeros(2, np.int32))
        sizes = doubling_buckets(4096, "cpu")
        self.tokens = {size: jax.device_put(np.full((1, size), token_id, np.int32)) for size in sizes}
        self.logprobs = {size: jax.device_put(made_up_logprobs(size, token_id)) for size in sizes}
        self.device = device

    def is_ready(self, key: Any) -> bool:
        return True

    has = is_ready

    def smallest_ready(self, kind: str, size: int, buckets: tuple[int, ...]) -> int:
        return next(bucket for bucket in buckets if bucket >= size)

    def __getitem__(self, key: Any) -> Any:
        state = self.state
        if key.kind == "forward":
            return lambda *_: (state, state, state, state, state, None)
        if key.kind == "sample":
            tokens = self.tokens[key.size]
            return lambda *_: (state, tokens if self.device is None else self.device.compute(tokens), None, None)
        if key.kind == "sample_full":
            full = (state, self.tokens[key.size], state, self.logprobs[key.size])
            return lambda *_: full
        return lambda *_: state


def made_up_logprobs(size: int, token_id: int) -> LogprobOutput:
    """As many candidates as an engine's programs give."""
    ids_ISJ = np.tile(token_id + np.arange(NUM_CANDIDATES, dtype=np.int32), (1, size, 1))
    return LogprobOutput(ids_ISJ, np.full(ids_ISJ.shape, -1.5, np.float32), np.ones((1, size), np.int32))


class Device:
    """Computes steps in order, `seconds` each, beginning when a step is dispatched and the one before is done."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.waited = 0.0  # seconds that the host waited for results
        self.busy: list[tuple[float, float]] = []  # begin and end of every step

    def now(self) -> float:
        return time.thread_time() + self.waited

    def compute(self, tokens: jax.Array) -> "Result":
        begin = max(self.now(), self.busy[-1][1] if self.busy else 0.0)
        self.busy.append((begin, begin + self.seconds))
        return Result(np.asarray(tokens), self, self.busy[-1][1])


class Result:
    """Tokens that cannot be read before the device has computed them."""

    def __init__(self, tokens: np.ndarray, device: Device, ready: float):
        self.tokens, self.device, self.ready = tokens, device, ready

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.device.waited += max(self.ready - self.device.now(), 0.0)
        return self.tokens


class FreeEncoder:
    """Tells rows where embeddings lie, and computes none."""

    def __init__(self, rows: RequestRows):
        self.rows = rows

    def dispatch(self, device: RealDevice, scheduled: SchedulerOutput) -> list[Any]:
        for request_id, index, page_ids in scheduled.encoder_pages:
            self.rows.visual.place(self.rows.row_of[request_id], index, page_ids)
        return []


def rope_offsets(features: Any, num_tokens: int) -> tuple[np.ndarray, int]:
    return np.zeros((3, num_tokens), np.int32), -PICTURE_TOKENS


class FreeExecutor:
    """An executor around the real runner."""

    weights_version = ""

    def __init__(self, config: EngineConfig, vocab_size: int, device: Device | None, sees: bool):
        scheduler, block_size = config.scheduler, config.cache.block_size
        groups = (KVCacheGroup(AttentionSpec(block_size, 1, 64, 2), (0,)),)
        self.kv_cache_config = KVCacheConfig((scheduler.max_num_seqs * (MAX_MODEL_LEN // block_size) + 1,), groups)
        self.encoder_cache_config = (
            EncoderCacheConfig(2048, PICTURE_TOKENS, 1 << 20, whole_spans=True) if sees else None
        )
        buckets = doubling_buckets(scheduler.max_num_batched_tokens, "cpu")
        programs: Any = FreePrograms(token_id=500, device=device)
        visual = VisualRows(scheduler.max_num_seqs, PICTURE_TOKENS, True, rope_offsets) if sees else None
        rows = [RequestRows(scheduler.max_num_seqs, len(groups), visual=visual)]
        layout = lambda size: step_layout(size, scheduler.max_num_seqs, [block_size])
        layouts = {size: replace(layout(size), has_visible_ends=sees, has_rope_offsets=sees) for size in buckets}
        sampler = Sampler(rows, StateLayout(scheduler.max_num_seqs, vocab_size), NO_PROCESSORS, multi_step_layouts={})
        nothing = RealDevice(programs, None, None, DeviceState(None, None, None, None, None))
        encoder: Any = FreeEncoder(rows[0]) if sees else None
        self.runner = ModelRunner(nothing, rows, layouts, sampler, encoder=encoder)
        sample_buckets = doubling_buckets(scheduler.max_num_seqs, "cpu")
        self.choice = ProgramChoice(programs, StepSizes("sample", buckets, sample_buckets, {}, features_of))

    def execute_model(self, scheduled: SchedulerOutput) -> PendingStep:
        scheduled.encoder_inputs = []  # nothing is encoded here
        scheduled.programs = self.choice.choose(scheduled)
        return self.runner.execute_model(scheduled)

    def max_step_tokens(self) -> int:
        return 1 << 30

    def max_decode_steps(self) -> int:
        return 1

    def can_run(self, extra: Any) -> bool:
        return True

    @property
    def workers(self) -> "FreeExecutor":
        return self

    def stats(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class Stopwatch:
    """Wraps methods so that the CPU time of every call is kept under a name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name].append(time.thread_time() - begin)

        setattr(owner, method, timed)


def make_engine(running: int, device: Device | None = None, pictures: bool = False) -> tuple[LLMEngine, FreeExecutor]:
    folder = resolve_model_folder("demo")
    hf = load_hf_config(folder)
    decoder = model_for(hf).config_from_hf(hf)
    facts = ModelFacts(decoder.max_position_embeddings, decoder.dtype, decoder.num_heads, decoder.vocab_size)
    options = {"max_num_seqs": running, "max_num_batched_tokens": max(2048, running), "block_size": 16}
    config = EngineConfig.from_options(**options, max_model_len=MAX_MODEL_LEN).resolve(facts, "cpu")
    executor = FreeExecutor(config, decoder.vocab_size, device, pictures)
    core = EngineCore(config, executor)
    if pictures:
        add = core.add_request
        core.add_request = lambda request: add(with_picture(request))
    return LLMEngine(config, build_input_processor(config, decoder, folder), core), executor


def with_picture(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request, whose prompt has a picture of its own."""
    key = hashlib.sha256(request.request_id.encode()).digest()
    runs, grid = [(4, PICTURE_TOKENS)], (1, 1, PICTURE_TOKENS)
    feature = MultiModalFeature(key, "image", 4, PICTURE_TOKENS, runs, grid, np.zeros((1, 3), np.uint8))
    return msgspec.structs.replace(request, mm_features=[feature])


def fill(engine: LLMEngine, num_requests: int, steps: int, kind: RequestOutputKind, **asked: Any) -> None:
    """Add requests that outlive `steps` steps, and go through the first ones."""
    params = SamplingParams(
        max_tokens=steps + 4 * WARM_UP_STEPS, ignore_eos=True, output_kind=kind, temperature=0.7, **asked
    )
    for i in range(num_requests):
        prompt = [300 + i % 1000] * (SHORTEST_PROMPT + i % 16)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    gc.collect()


def measure(engine: LLMEngine, executor: FreeExecutor, steps: int) -> dict[str, list[float]]:
    """CPU seconds of every step, by part."""
    watch, core = Stopwatch(), engine._core
    watch.wrap(core._scheduler, "schedule", "schedule")
    watch.wrap(executor, "execute_model", "prepare and dispatch")
    watch.wrap(core._scheduler, "update_from_output", "update")
    watch.wrap(engine._output_processor, "process", "detokenise and hand out")
    watch.wrap(engine, "step", "whole step")
    for _ in range(steps):
        engine.step()
    return watch.seconds


def print_parts(parts: dict[str, list[float]], running: int) -> None:
    """Mean, median and fastest of each part. The fastest ones show what a quiet machine would."""
    print("microseconds per running request and step\n" + " " * 28 + "mean   median  fastest")
    for name, seconds in parts.items():
        summary = (statistics.mean(seconds), statistics.median(seconds), min(seconds))
        print(f"  {name:24s}" + "".join(f"{1e6 * value / running:9.2f}" for value in summary))


def print_profile(engine: LLMEngine, steps: int, num_rows: int) -> None:
    """The functions that take most of the time, without what they call."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        engine.step()
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(num_rows)


def print_overlap(engine: LLMEngine, device: Device, steps: int) -> None:
    """How long the device had nothing to do, and how long the host waited for it."""
    device.busy.clear()
    waited = device.waited
    for _ in range(steps):
        engine.step()
    begin, end = device.busy[0][0], device.busy[-1][1]
    gaps = [after - before for (_, before), (after, _) in itertools.pairwise(device.busy)]
    whole, waits = 1e3 * (end - begin) / len(device.busy), 1e3 * (device.waited - waited) / steps
    print(f"  device idle      {100 * sum(gaps) / (end - begin):6.2f} % of the time")
    print(f"  steps with a gap {sum(gap > 0 for gap in gaps):6d} of {len(gaps)}, the longest {1e3 * max(gaps):.2f} ms")
    print(f"  one step         {whole:6.2f} ms: the host works {whole - waits:.2f} and waits {waits:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--kind", choices=[kind.name.lower() for kind in RequestOutputKind], default="delta")
    parser.add_argument("--asked", choices=ASKED, default="nothing", help="what requests ask for besides their tokens")
    parser.add_argument("--pictures", action="store_true", help="each prompt has a picture")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print a profile instead of the parts")
    parser.add_argument("--device-ms", type=float, default=0.0, help="show the overlap with steps of this length")
    args = parser.parse_args()
    device = Device(args.device_ms / 1e3) if args.device_ms else None
    engine, executor = make_engine(args.running, device, args.pictures)
    fill(engine, args.running + args.waiting, args.steps, RequestOutputKind[args.kind.upper()], **ASKED[args.asked])
    pictures = ", with pictures" if args.pictures else ""
    print(f"{args.running} running, {args.waiting} waiting{pictures}, {args.kind}, asked for: {args.asked}", end=": ")
    if device is not None:
        print(f"a device that takes {args.device_ms:g} ms a step")
        print_overlap(engine, device, args.steps)
    elif args.profile:
        print_profile(engine, args.steps, args.profile)
    else:
        print_parts(measure(engine, executor, args.steps), args.running)


if __name__ == "__main__":
    main()
