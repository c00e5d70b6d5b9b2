"""`jaxpaged bench latency`: how long an engine takes for one batch of equal requests.

This module knows flags and figures, and the engine as `LLM`.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.tools.bench.offline import (
    add_generation_flags,
    add_offline_flags,
    check_at_least,
    check_json_path,
    open_llm,
    options_of,
    percentiles,
    write_json,
)

EPILOG = """\
The prefix cache is off unless --enable-prefix-caching is given: every round has the same prompts.

example:
  jaxpaged bench latency --input-len 128 --output-len 32 --batch-size 1 --num-iters 10
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "latency", help="the time that one batch takes", usage="%(prog)s [MODEL] [options]", epilog=EPILOG
    )
    counts = (
        ("input-len", 32, "tokens of a prompt"),
        ("output-len", 128, "tokens of an answer"),
        ("batch-size", 8, "prompts"),
        ("n", 1, "answers per prompt, or beams"),
        ("num-iters-warmup", 10, "rounds that are not measured"),
        ("num-iters", 30, "rounds that are measured"),
    )
    add_offline_flags(parser, counts)
    parser.add_argument("--use-beam-search", action="store_true", help="search with --n beams")
    add_generation_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Measure and report. Returns the exit status."""
    check_at_least(args, 1, "input_len", "output_len", "batch_size", "n", "num_iters")
    check_at_least(args, 0, "num_iters_warmup")
    check_json_path(args.output_json)
    with open_llm(options_of(args, enable_prefix_caching=False)) as llm:
        model = llm.llm_engine.config.model.model
        seconds = measure(batch(llm, args), args.num_iters_warmup, args.num_iters)
    result = latency_result(seconds, model)
    print(f"Avg latency: {result['avg_latency']:.6g} seconds")
    print(f"Std latency: {result['std_latency']:.6g} seconds")
    for percentile, value in result["percentiles"].items():
        print(f"{percentile}% percentile latency: {value:.6g} seconds")
    write_json(args.output_json, result)
    return 0


def batch(llm: Any, args: argparse.Namespace) -> Callable[[], Any]:
    """A function that completes the batch once."""
    import numpy as np

    from jaxpaged.sampling_params import BeamSearchParams, SamplingParams

    vocabulary = llm.llm_engine.input_processor.vocab_size
    ids = np.random.default_rng(0).integers(0, vocabulary, (args.batch_size, args.input_len)).tolist()
    prompts = [{"prompt_token_ids": each} for each in ids]
    if args.use_beam_search:
        beams = BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)
        return lambda: llm.beam_search(prompts, beams)
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    return lambda: llm.generate(prompts, params, use_tqdm=False)


def measure(complete: Callable[[], Any], num_warmups: int, num_rounds: int) -> list[float]:
    """Seconds of every measured round."""
    for _ in range(num_warmups):
        complete()
    seconds = []
    for _ in range(num_rounds):
        begin = time.perf_counter()
        complete()
        seconds.append(time.perf_counter() - begin)
    return seconds


def latency_result(seconds: list[float], model: str) -> dict[str, Any]:
    """vLLM's fields."""
    mean = sum(seconds) / len(seconds)
    variance = sum((each - mean) ** 2 for each in seconds) / len(seconds)
    return {
        "model_id": model,
        "avg_latency": mean,
        "std_latency": variance**0.5,
        "latencies": seconds,
        "percentiles": percentiles(seconds),
    }
