#!/usr/bin/env python
"""How much of the time of a prompt that another engine computes is transfer that nothing hides.

    python scripts/bench_kv_remote.py [--lengths 512 2048] [--chunk 256] [--repeats 5] [--transport tcp]

Two engines of the embedded model in one process, of which one computes prompts in chunks and the other one generates.
For prefixes of some lengths, the milliseconds until the first token: where one engine computes all, where it has all in
its prefix cache, and where the other one asks for pages while they are computed, and once they are. What that takes
longer than a prefix cache after the last chunk is transfer that was not hidden. Medians of one run: compare the ratios.
Run beside nothing else.
"""

import argparse
import statistics
import threading
import time
from typing import Any

import msgspec

from jaxpaged import LLM, SamplingParams

OPTIONS = {
    "max_model_len": 4096,
    "max_num_seqs": 2,
    "num_scheduler_steps": 1,
    "wait_for_programs": True,
}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
Prompt = dict[str, list[int]]


def prompt_of(num_tokens: int, number: int) -> Prompt:
    """Token ids that no other prompt begins with."""
    return {"prompt_token_ids": [100 + number, *(100 + 7 * i % 900 for i in range(num_tokens))]}


def params_of(**transfer: Any) -> SamplingParams:
    return msgspec.structs.replace(FIRST, extra_args={"kv_transfer_params": transfer})


def alone(llm: LLM, prompt: Prompt) -> float:
    """Seconds until an engine's first token."""
    begin = time.perf_counter()
    llm.generate([prompt], FIRST, use_tqdm=False)
    return time.perf_counter() - begin


def handed_over(producer: LLM, consumer: LLM, prompt: Prompt, *, early: bool) -> tuple[float, float]:
    """Seconds until the consumer's first token, and how many of them after the prompt was computed."""
    engine, ends, results = producer.llm_engine, [], []

    def follow(said: dict[str, Any]) -> None:
        results.extend(consumer.generate([prompt], params_of(**said), use_tqdm=False))
        ends.append(time.perf_counter())

    begin, follower = time.perf_counter(), None
    engine.add_request("prompt", prompt, params_of(do_remote_decode=True))
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.kv_transfer_params and follower is None and (early or output.finished):
                follower = threading.Thread(target=follow, args=(output.kv_transfer_params,))
                computed = time.perf_counter()
                follower.start()
    if early:
        computed = time.perf_counter()
    assert follower is not None, "nothing was lent"
    follower.join()
    assert results[0].num_cached_tokens > len(prompt["prompt_token_ids"]) - 64, results
    return ends[0] - begin, ends[0] - computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of the prefixes")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a step, at most")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of which the median is shown")
    parser.add_argument("--transport", default="auto", help="as --kv-transport")
    args = parser.parse_args()
    options = {**OPTIONS, "token_buckets": (8, args.chunk)}
    producer = LLM(**options, kv_role="kv_producer", kv_transport=args.transport)
    consumer = LLM(**options, kv_role="kv_consumer", kv_transport=args.transport)
    for length in args.lengths:
        took: dict[str, list[float]] = {}
        for number in range(0, 3 * (args.repeats + 1), 3):
            prompts = [prompt_of(length, number + i) for i in range(3)]
            whole, behind = handed_over(producer, consumer, prompts[0], early=True)
            whole_late, behind_late = handed_over(producer, consumer, prompts[1], early=False)
            each = {
                "computed": alone(producer, prompts[2]), "found": alone(producer, prompts[2]), "early": whole,
                "behind": behind, "late": whole_late, "behind_late": behind_late,
            }  # fmt: skip
            for name, seconds in each.items():
                took.setdefault(name, []).append(seconds)
        mid = {name: 1000 * statistics.median(each[1:]) for name, each in took.items()}
        shown = mid["behind"] - mid["found"]
        whole_transfer = mid["behind_late"] - mid["found"]
        print(
            f"{length} tokens in chunks of {args.chunk}: computed {mid['computed']:.1f} ms, found {mid['found']:.1f}; "
            f"handed over while it is computed {mid['early']:.1f}, of which {shown:.1f} are transfer that was not "
            f"hidden ({shown / mid['early']:.0%}); handed over once it is computed {mid['late']:.1f}, of which "
            f"{whole_transfer:.1f} are transfer"
        )
    for llm in (producer, consumer):
        llm.shutdown()


if __name__ == "__main__":
    main()
