#!/usr/bin/env python
"""What drafting gains and costs on this machine: tokens per second with drafts over those without, taken in turns.

    python scripts/bench_speculation.py [--model demo] [--method ngram] [--repeat 5] [--fixed-steps]

Each ratio is the median of those of several turns, in which each engine runs once: on a shared machine the fastest
runs of two equal engines differ by more than a tenth. The requests repeat a text of their prompt (greedy), or go on at
temperature 2, so that hardly anything occurs twice; "tells" is a story of the embedded model at temperature 1, as
drafts by a model are meant for. Also printed, and the same on a busy machine: which share of the drafts was accepted at
least so far, how many tokens were drafted, and how many a request got in a step.
`--speculative-config` says more than `--method`, by which 4 tokens are drafted. `--model` is whatever `jaxpaged
generate` takes, or one of bench_offline's random models. `--fixed-steps` gives both one decode step a program, as
slower models have anyway.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offline_bench import checkpoints

from jaxpaged import LLM, SamplingParams
from jaxpaged.config.speculation import METHODS

NUM_TOKENS = 256
SENTENCE = (
    "The little fox went to the river and looked for a red stone. Then he ran home and told his mother about it. "
)
TEXTS = {
    "repeats": (SENTENCE * 4, {"temperature": 0.0}),
    "tells": ("Once upon a time", {"temperature": 1.0}),
    "does not": ("Once upon a time", {"temperature": 2.0}),
}
COUNTS = "vllm:spec_decode_num_"


def run(llm: LLM, text: str, sampling: dict, rows: int, nth: int) -> tuple[float, float]:
    """(tokens per second, tokens per second of processor time). What is drawn differs from run to run, so that the
    method `suffix` does not find it among earlier answers."""
    seeds = range(nth * rows, (nth + 1) * rows)
    params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed, **sampling) for seed in seeds]
    wall, processor = time.perf_counter(), time.process_time()
    answers = llm.generate([text] * rows, params, use_tqdm=False)
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    if tokens != rows * NUM_TOKENS:
        raise RuntimeError(
            f"{tokens} tokens were made, and {rows} * {NUM_TOKENS} asked for: max_model_len is too small."
        )
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - processor)


def counts(llm: LLM) -> dict[str, int]:
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(COUNTS):
            found[metric.name.removeprefix(COUNTS) + metric.labels.get("position", "")] = metric.value
    return found


def compare(model: str, config: dict, repeat: int, fixed_steps: bool) -> None:
    shared = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 128, "enable_prefix_caching": False}
    if fixed_steps:
        shared["num_scheduler_steps"] = 1
    engines = [LLM(model, **shared), LLM(model, **shared, speculative_config=config)]
    for llm in engines:
        llm.wait_for_programs()
    print(
        "text, requests: tokens/s without, with, ratio; of processor time: ratio; accepted by position; drafted; a step"
    )
    for name, (text, sampling) in TEXTS.items():
        for rows in (1, 8):
            for engine in engines:
                run(engine, text, sampling, rows, repeat)
            before = counts(engines[1])
            turns = [[run(engine, text, sampling, rows, nth) for engine in engines] for nth in range(repeat)]
            wall, wall_with = (statistics.median(wall for wall, _ in runs) for runs in zip(*turns))
            ratio, of_processor = (statistics.median(new[i] / old[i] for old, new in turns) for i in range(2))
            seen = {key: value - before[key] for key, value in counts(engines[1]).items()}
            positions = [seen[f"accepted_tokens_per_pos{i}"] for i in range(config["num_speculative_tokens"])]
            num_tokens = repeat * rows * NUM_TOKENS
            print(
                f"{name}, {rows}: {wall:.0f} {wall_with:.0f} {ratio:.2f}; {of_processor:.2f}; "
                f"{' '.join(f'{count / max(seen["drafts"], 1):.2f}' for count in positions)}; {seen['draft_tokens']}; "
                f"{num_tokens / (num_tokens - seen['accepted_tokens']):.2f}"
            )
    for llm in engines:
        llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default="ngram", choices=METHODS)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--fixed-steps", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = checkpoints.MODELS.get(options.model)
        model = str(checkpoints.make_checkpoint(shape, Path(folder))) if shape else options.model
        config = options.speculative_config or {"method": options.method, "num_speculative_tokens": 4}
        compare(model, config, options.repeat, options.fixed_steps)


if __name__ == "__main__":
    main()
