"""What keeping keys and values besides the device costs and brings, with the embedded model.

For prefixes of some lengths, the milliseconds until the first token where the prefix is computed, found in the prefix
cache, and loaded from host memory or a disk; decoding with and without saving; the host's time in a step in which
nothing is saved or loaded; and the first answer of an engine that was started anew on the same folder. All in one run
on one machine: compare the ratios. Run beside nothing else:

    python scripts/bench_kv_transfer.py [--lengths 512 2048] [--repeats 5]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from jaxpaged import LLM, SamplingParams

OPTIONS = {
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "token_buckets": (8, 512),
    "num_scheduler_steps": 1,
    "wait_for_programs": True,
}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def prompt_of(num_tokens: int, number: int) -> dict:
    """Token ids that no other prompt begins with."""
    return {
        "prompt_token_ids": [100 + number % 1900, 100 + number // 1900, *(100 + 7 * i % 900 for i in range(num_tokens))]
    }


def milliseconds(llm: LLM, prompt: dict) -> float:
    begin = time.perf_counter()
    llm.generate([prompt], FIRST, use_tqdm=False)
    return 1000 * (time.perf_counter() - begin)


def median(repeats: int, measure: Callable[[int], float]) -> float:
    """Of measurements with numbers, after one that does not count."""
    return statistics.median([measure(number) for number in range(repeats + 1)][1:])


def first_tokens(llm: LLM, length: int, repeats: int, first_number: int) -> dict[str, float]:
    """How long a prefix takes computed, found, and loaded from the tiers that the engine has."""

    def loaded(number: int) -> float:
        time.sleep(0.3)  # what was saved is in the tier by then
        assert llm.reset_prefix_cache()
        return milliseconds(llm, prompt_of(length, first_number + number))

    computed = median(repeats, lambda number: milliseconds(llm, prompt_of(length, first_number + number)))
    found = median(repeats, lambda number: milliseconds(llm, prompt_of(length, first_number + number)))
    return {"computed": computed, "found": found, "loaded": median(repeats, loaded)}


def decode_rate(llm: LLM, first_number: int) -> float:
    """Tokens a second of 8 requests."""
    params = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True)
    prompts = [prompt_of(16, first_number + number) for number in range(8)]
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return 8 * 128 / (time.perf_counter() - begin)


def idle_microseconds(llm: LLM, count: int = 20_000) -> float:
    """CPU time of a step's calls to what saves and loads, where it has nothing to do."""
    core: Any = llm.llm_engine._core
    [record], _ = core.step_log.read(most=1)
    assert core.transfer.deliver() == []
    begin = time.thread_time()
    for step_id in range(count):
        core.transfer.deliver()
        core.transfer.before_step(step_id)
        core.transfer.save()
        core.transfer.hand_over([])
        core.transfer.observe(record)
        core.transfer.settle(step_id)
    return 1e6 * (time.thread_time() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="tokens of the prefixes")
    parser.add_argument("--repeats", type=int, default=5, help="measurements, of which the median is shown")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiers = {"none": None, "host": "host=2G", "disk": f"disk={folder}:4G"}
        for name, offload in tiers.items():
            llm = LLM(kv_offload=offload, **OPTIONS)
            rates = [decode_rate(llm, 10_000 + 8 * i) for i in range(3)]
            print(f"{name}: {max(rates):.0f} tokens/s decoded by 8 requests, the best of 3")
            print(f"{name}: {idle_microseconds(llm):.1f} us of the host in a step that saves and loads nothing")
            for length in args.lengths:
                took = first_tokens(llm, length, args.repeats, length)
                if offload is None:
                    del took["loaded"]
                words = ", ".join(f"{how} {value:.1f} ms" for how, value in took.items())
                print(f"{name}: first token behind {length} tokens: {words}")
            llm.shutdown()
        for name in ("none", "disk"):
            llm = LLM(kv_offload=tiers[name], **OPTIONS)
            took = milliseconds(llm, prompt_of(args.lengths[-1], args.lengths[-1] + 1))
            print(f"{name}: first answer after a restart, behind {args.lengths[-1]} tokens: {took:.1f} ms")
            llm.shutdown()


if __name__ == "__main__":
    main()
