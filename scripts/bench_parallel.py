#!/usr/bin/env python
"""One engine on 1, 2, 4 and 8 devices, split, with whole experts, and as attention ranks of one device: the same
tokens, the host's time for a step, and how long a step takes against one that is split over as many devices. And
experts against a dense model in which a token meets as many columns.

    python scripts/bench_parallel.py [--devices 1 2 4 8] [--tokens 32] [--repeat 3]

The devices are virtual ones of this machine's CPU, which share its cores: they show that answers agree and what the
host does for a step, and not how fast several devices are. Host time is CPU time of the thread that schedules,
dispatches and reads results, of a model so small that it is next to nothing itself. The last table has decode speeds of
one device, by the wall clock. All weights are random and float32.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxpaged import LLM, SamplingParams

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LARGE = {"hidden_size": 512, "num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 8}
LARGE |= {"moe_intermediate_size": 128}
OF_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
REQUESTS = 32
SPREAD = ("spread", "spread over ranks")
WAYS = ("split", *SPREAD)


def write_model(folder: Path, sizes: dict[str, int], dense: bool = False) -> str:
    """A Qwen 3 with experts, or one whose feed-forward blocks have as many columns as a token meets of those."""
    columns = sizes["num_experts_per_tok"] * sizes["moe_intermediate_size"]
    kind = "Qwen3" if dense else "Qwen3Moe"
    hf: dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": "qwen3" if dense else "qwen3_moe",
        "vocab_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 16,
        "intermediate_size": columns,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 1,
        "bos_token_id": 1,
    }
    hf |= {name: value for name, value in sizes.items() if not dense or name not in OF_EXPERTS}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    return str(folder)


def open_model(folder: str, ranks: int = 1, **options: Any) -> LLM:
    """An engine for `REQUESTS` requests at a time, of which each attention rank has a share."""
    requests = REQUESTS // ranks
    return LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=requests,
        max_num_batched_tokens=64,
        token_buckets=[requests, 64],
        enable_prefix_caching=False,
        num_scheduler_steps=1,
        wait_for_programs=True,
        num_gpu_blocks_override=requests * 8 + 1,
        data_parallel_size=ranks,
        **options,
    )


def answers(llm: LLM, num_requests: int, num_tokens: int) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 2000 for j in range(16)]} for i in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]


def same_tokens(folder: str, devices: list[int], num_tokens: int, repeat: int) -> None:
    """Print for every number of devices, and all ways to use them, whether tokens agree, and times of a step."""
    expected, alone, split = None, 0.0, 0.0
    print("| devices | experts are | tokens | host ms a step | of one device | a step, of one that is split |")
    print("|---|---|---|---|---|---|")
    for num_devices in devices:
        for how in WAYS if num_devices > 1 else ("whole",):
            with open_model(folder, **options_of(how, num_devices)) as llm:
                found = answers(llm, REQUESTS, num_tokens)
                host, wall = map(min, zip(*[step_seconds(llm, num_tokens) for _ in range(repeat)]))
            expected, alone, split = expected or found, alone or host, split if how in SPREAD else wall
            agree = sum(a == b for own, other in zip(found, expected) for a, b in zip(own, other))
            total, ratios = REQUESTS * num_tokens, f"{host / alone:.2f} | {wall / split:.2f}"
            print(f"| {num_devices} | {how} | {agree} of {total} alike | {1e3 * host:.2f} | {ratios} |", flush=True)


def options_of(how: str, num_devices: int) -> dict[str, Any]:
    if how == "spread over ranks":
        return {"ranks": num_devices, "enable_expert_parallel": True}
    return {"tensor_parallel_size": num_devices, "enable_expert_parallel": how == "spread"}


def step_seconds(llm: LLM, num_tokens: int) -> tuple[float, float]:
    """(CPU time of this thread, time) for a step, with `REQUESTS` requests in nearly all of them."""
    steps, begin, host_begin = llm.llm_engine.executor_stats()["steps"], time.perf_counter(), time.thread_time()
    answers(llm, REQUESTS, num_tokens)
    host, wall = time.thread_time() - host_begin, time.perf_counter() - begin
    steps = llm.llm_engine.executor_stats()["steps"] - steps
    return host / steps, wall / steps


def experts_against_dense(folder: Path, num_tokens: int, repeat: int) -> None:
    """Print decode speeds of both kinds of model, taken in turns, at several numbers of requests."""
    sparse, dense = (open_model(write_model(folder / str(each), LARGE, each)) for each in (False, True))
    print(f"\n| requests | {LARGE['num_experts']} experts, tokens/s | dense, tokens/s | ratio |\n|---|---|---|---|")
    for num_requests in (1, 8, REQUESTS):
        pairs = [[speed(llm, num_requests, num_tokens) for llm in (sparse, dense)] for _ in range(1 + repeat)][1:]
        ratio = statistics.median(a / b for a, b in pairs)
        a, b = (max(each) for each in zip(*pairs))
        print(f"| {num_requests} | {a:.0f} | {b:.0f} | {ratio:.2f} |")
    for llm in (sparse, dense):
        llm.shutdown()


def speed(llm: LLM, num_requests: int, num_tokens: int) -> float:
    begin = time.perf_counter()
    answers(llm, num_requests, num_tokens)
    return num_requests * num_tokens / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], choices=range(1, 9))
    parser.add_argument("--tokens", type=int, default=32, help="of every answer")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        same_tokens(write_model(Path(folder) / "small", SMALL), options.devices, options.tokens, options.repeat)
        experts_against_dense(Path(folder), options.tokens, options.repeat)


if __name__ == "__main__":
    main()
