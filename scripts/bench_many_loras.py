#!/usr/bin/env python
"""How an engine serves many more adapters than it has slots for, beside the same load on one adapter.

    python scripts/bench_many_loras.py [--model demo] [--adapters 1000] [--slots 8] [--host 64] [--clients 32]

The adapters are links to one folder, so each is read from files of its own name; which of them a request has follows
Zipf's law (`--zipf`, the exponent). So many clients each have a request under way, and send the next one when it ends.
`one`: all requests have one adapter; `base`: none has any; `as many as slots`: they take turns with 8. Printed are
tokens per second, the time to the first token, the longest of them for an adapter that 1 % of requests or fewer have,
and what moved.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxpaged import LLM, LoRARequest, SamplingParams  # noqa: E402
from jaxpaged.engine.core_calls import RestoreLoras  # noqa: E402
from jaxpaged.messages import LoRAInfo  # noqa: E402


def catalogue(llm: LLM, folder: Path, links: Path, count: int) -> list[LoRAInfo]:
    """As many adapters, known to the engine and not yet read."""
    for number in range(1, count + 1):
        (links / str(number)).symlink_to(folder)
    engine = llm.llm_engine
    first = engine.add_lora(LoRARequest("1", 1, str(links / "1")))
    infos = [LoRAInfo(str(i), i, str(links / str(i)), first.digest, first.rank) for i in range(1, count + 1)]
    engine.call(RestoreLoras(infos))
    return infos


def serve(llm: LLM, wanted: Sequence[LoRAInfo | None], clients: int, seed: int) -> tuple[float, list[float]]:
    """(tokens per second, seconds to the first token of each request)."""
    draw, engine = random.Random(seed), llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    coming, begin, num_tokens = iter(enumerate(wanted)), time.perf_counter(), 0

    def send() -> None:
        for number, lora in coming:
            prompt = {"prompt_token_ids": [draw.randrange(100, 2000) for _ in range(16)]}
            sent[str(number)] = time.perf_counter()
            engine.add_request(str(number), prompt, params, lora_request=lora)
            return

    for _ in range(clients):
        send()
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.error is None, output.error
            first.setdefault(output.request_id, time.perf_counter() - sent[output.request_id])
            if output.finished:
                num_tokens += len(output.outputs[0].token_ids)
                send()
    return num_tokens / (time.perf_counter() - begin), [first[str(i)] for i in range(len(wanted))]


def told(name: str, rate: float, waits: Sequence[float], wanted: Sequence[LoRAInfo | None]) -> str:
    shares = Counter(each.lora_int_id for each in wanted if each)
    rare = [w for w, each in zip(waits, wanted) if each and shares[each.lora_int_id] <= len(wanted) / 100]
    p50, p99 = 1e3 * np.percentile(waits, [50, 99])
    longest = f"{1e3 * max(rare):7.0f} ms of a rare one" if rare else ""
    return f"{name:20} {rate:8.0f} tokens/s, first token {p50:6.0f} ms, p99 {p99:6.0f} ms, longest {longest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapter", default=str(ROOT / "jaxpaged" / "assets" / "demo-pirate"), help="its folder")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--host", type=int, default=64, help="adapters in host memory")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--zipf", type=float, default=1.0)
    options = parser.parse_args()
    rank = json.loads((Path(options.adapter) / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    with tempfile.TemporaryDirectory() as links:
        llm = LLM(
            options.model,
            enable_lora=True,
            max_loras=options.slots,
            max_lora_rank=max(rank, 8),
            max_cpu_loras=options.host,
            max_num_seqs=options.clients,
            max_num_batched_tokens=256,
            max_model_len=64,
            num_scheduler_steps=1,
        )
        infos = catalogue(llm, Path(options.adapter).resolve(), Path(links), options.adapters)
        llm.llm_engine.wait_for_programs()
        draw, count = random.Random(1), options.requests
        weights = [1 / (i + 1) ** options.zipf for i in range(len(infos))]
        loads: dict[str, list[LoRAInfo | None]] = {
            "base": [None] * count,
            "one": [infos[0]] * count,
            "as many as slots": [infos[i % options.slots] for i in range(count)],
            "Zipf": list(draw.choices(infos, weights, k=count)),
        }
        for name, wanted in loads.items():
            serve(llm, wanted[: 4 * options.clients], options.clients, seed=2)  # programs and slots are warm
            rate, waits = serve(llm, wanted, options.clients, seed=3)
            print(told(name, rate, waits, wanted), flush=True)
        stats = llm.llm_engine.metrics.stats.lora
        print(f"{stats}\nrecompiles {llm.llm_engine.executor_stats()['recompiles']}")
        llm.shutdown()


if __name__ == "__main__":
    main()
