"""Host time of one engine step, by part, with a model that costs nothing.

    python scripts/bench_host.py [--running 256] [--waiting 0] [--steps 200]

The real scheduler, runner, output processor and detokenizer serve the embedded model's tokenizer; only the compiled
programs are replaced, by functions that return arrays made beforehand. What is left is what the host does for every
running request in every step. Times are CPU times of the thread, so other programs on the machine do not count.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from jaxpaged.config import EngineConfig, ModelFacts
from jaxpaged.engine.build import build_input_processor
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.core_client import InprocClient
from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.kv_cache_spec import AttentionSpec, KVCacheConfig, KVCacheGroup
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import model_for
from jaxpaged.params.hub import resolve_model_folder
from jaxpaged.sampling.custom import NO_PROCESSORS
from jaxpaged.sampling.state import StateLayout
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.worker.buckets import doubling_buckets
from jaxpaged.worker.model_runner import DeviceState, ModelRunner
from jaxpaged.worker.packed import step_layout
from jaxpaged.worker.request_rows import RequestRows

PROMPT = list(range(300, 340))
MAX_MODEL_LEN = 4096
WARM_UP_STEPS = 30


class FreePrograms:
    """A program table whose programs cost nothing: they return arrays of the right kind made beforehand."""

    def __init__(self, token_id: int):
        self.state = jax.device_put(np.zeros(2, np.int32))
        self.tokens = {size: jax.device_put(np.full(size, token_id, np.int32)) for size in doubling_buckets(4096)}

    def smallest_ready(self, kind: str, size: int, buckets: tuple[int, ...]) -> int:
        return next(bucket for bucket in buckets if bucket >= size)

    def __getitem__(self, key: Any) -> Any:
        state = self.state
        if key.kind == "forward":
            return lambda *_: (state, state, state, state)
        if key.kind == "sample":
            tokens = self.tokens[key.size]
            return lambda *_: (state, tokens)
        return lambda *_: state


class FreeExecutor:
    """An executor around the real runner."""

    def __init__(self, config: EngineConfig, vocab_size: int):
        scheduler, block_size = config.scheduler, config.cache.block_size
        groups = (KVCacheGroup(AttentionSpec(block_size, 1, 64, 2), (0,)),)
        self.kv_cache_config = KVCacheConfig(scheduler.max_num_seqs * (MAX_MODEL_LEN // block_size) + 1, groups)
        buckets = doubling_buckets(scheduler.max_num_batched_tokens)
        programs: Any = FreePrograms(token_id=500)
        self.runner = ModelRunner(
            programs=programs,
            params=None,
            head=None,
            state=DeviceState(None, None, None, None),
            rows=RequestRows(scheduler.max_num_seqs, len(groups)),
            sampling=StateLayout(scheduler.max_num_seqs, vocab_size),
            custom=NO_PROCESSORS,
            layouts={size: step_layout(size, scheduler.max_num_seqs, len(groups), block_size) for size in buckets},
            sample_buckets=doubling_buckets(scheduler.max_num_seqs),
        )
        self.execute = self.runner.execute

    def stats(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


class Stopwatch:
    """Wraps methods so that their CPU time is added up under a name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        function = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - begin

        setattr(owner, method, timed)


def make_engine(running: int) -> tuple[LLMEngine, FreeExecutor]:
    folder = resolve_model_folder("demo")
    hf = load_hf_config(folder)
    decoder = model_for(hf).config_from_hf(hf)
    facts = ModelFacts(decoder.max_position_embeddings, decoder.dtype, decoder.num_heads, decoder.vocab_size)
    options = {"max_num_seqs": running, "max_num_batched_tokens": max(2048, running), "block_size": 16}
    config = EngineConfig.from_options(**options, max_model_len=MAX_MODEL_LEN).resolve(facts, "cpu")
    executor = FreeExecutor(config, decoder.vocab_size)
    core = EngineCore(config, executor)
    return LLMEngine(config, build_input_processor(config, decoder, folder), InprocClient(core)), executor


def measure(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Microseconds per running request and step, by part."""
    engine, executor = make_engine(running)
    params = SamplingParams(
        max_tokens=steps + 4 * WARM_UP_STEPS, ignore_eos=True, output_kind=RequestOutputKind.DELTA, temperature=0.7
    )
    for i in range(running + waiting):
        engine.add_request(str(i), {"prompt_token_ids": PROMPT}, params)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    watch, core = Stopwatch(), engine._core._core
    watch.wrap(core._scheduler, "schedule", "schedule")
    watch.wrap(core._scheduler, "update_from_output", "update")
    watch.wrap(executor, "execute", "prepare and dispatch")
    watch.wrap(engine._output_processor, "process", "detokenise and hand out")
    totals = []
    for _ in range(steps):
        begin = time.thread_time()
        engine.step()
        totals.append(time.thread_time() - begin)
    scale = 1e6 / steps / running
    parts = {name: seconds * scale for name, seconds in watch.seconds.items()}
    parts["everything else"] = sum(totals) * scale - sum(parts.values())
    parts["whole step (mean)"] = sum(totals) * scale
    parts["whole step (median)"] = statistics.median(totals) * 1e6 / running
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    parts = measure(args.running, args.waiting, args.steps)
    print(f"{args.running} running, {args.waiting} waiting: microseconds per running request and step")
    for name, value in parts.items():
        print(f"  {name:24s} {value:7.2f}")
    print(f"  one step of all requests {parts['whole step (median)'] * args.running / 1000:7.2f} ms (median)")


if __name__ == "__main__":
    main()
