"""What is asked of every engine: requests as token ids from a fixed seed, greedy, each with its number of tokens.

Every round draws new prompts, so that a prefix cache helps only where a workload means it to. This module knows no
engine and measures nothing.
"""

import dataclasses
import random
from collections.abc import Callable

FIRST_WORD_ID = 258  # below are special tokens and bytes, see checkpoints.tokenizer
LONGEST_SHORT_PROMPT = 512


@dataclasses.dataclass(frozen=True)
class Request:
    prompt_token_ids: list[int]
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Workload:
    """`sizes` draws (tokens in, tokens out) of every request. `metric` says which tokens per second count.

    decode: output tokens after the first, over the time from the first to the last; prefill: prompt tokens over the
    time to the first output token; output: all output tokens over the whole time. `shared_prefix`: that many tokens
    at the beginning of all prompts are the same.
    """

    name: str
    title: str
    metric: str
    sizes: Callable[[random.Random], list[tuple[int, int]]]
    shared_prefix: int = 0


def mixed_sizes(rng: random.Random, num_requests: int) -> list[tuple[int, int]]:
    return [(rng.randint(32, LONGEST_SHORT_PROMPT), rng.randint(64, 128)) for _ in range(num_requests)]


def short_sizes(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randint(16, 64), rng.randint(16, 32)) for _ in range(256)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", "1 request, 128 in, 128 out", "decode", lambda rng: [(128, 128)]),
        Workload("prefill-1k", "prefill of 1,024 tokens", "prefill", lambda rng: [(1024, 1)]),
        Workload("prefill-8k", "prefill of 8,192 tokens", "prefill", lambda rng: [(8192, 1)]),
        Workload("mixed", "32 requests, 32-512 in, 64-128 out", "output", lambda rng: mixed_sizes(rng, 32)),
        Workload("shared", "32 requests, 512 in common + 32, 32 out", "output", lambda rng: [(544, 32)] * 32, 512),
        Workload("short", "256 requests, 16-64 in, 16-32 out", "output", short_sizes),
        Workload(
            "long",
            "1 request of 8,192 in beside 31 mixed, 64-128 out",
            "output",
            lambda rng: [(8192, 96), *mixed_sizes(rng, 31)],
        ),
    )
}


def make_requests(workload: Workload, vocab_size: int, round_index: int, scale: float = 1.0) -> list[Request]:
    """The requests of one round: sizes are the same in all rounds, token ids are not.

    `scale` in (0, 1] shrinks the tokens of every request and, in batches, the number of requests.
    """
    sizes = workload.sizes(random.Random(workload.name))
    sizes = sizes[: max(min(len(sizes), 2), round(scale * len(sizes)))]
    sizes = [(max(4, round(scale * tokens_in)), max(1, round(scale * tokens_out))) for tokens_in, tokens_out in sizes]
    rng = random.Random(f"{workload.name} {round_index}")
    shared = prompt(rng, vocab_size, round(scale * workload.shared_prefix))
    return [Request(shared + prompt(rng, vocab_size, size - len(shared)), max_tokens) for size, max_tokens in sizes]


def prompt(rng: random.Random, vocab_size: int, length: int) -> list[int]:
    return [rng.randrange(FIRST_WORD_ID, vocab_size) for _ in range(length)]


def warm_up_requests(vocab_size: int) -> list[Request]:
    """A few small requests that every engine completes before anything is timed."""
    rng = random.Random("warm-up")
    return [Request(prompt(rng, vocab_size, 20 + 5 * index), 8) for index in range(8)]


FIRST_MINUTE_BATCH = [(256, 32)] * 4
MOST_BATCHES = 600
"""As many as an engine ten times as fast as the fastest on two cores completes in a minute."""


def first_minute(vocab_size: int, scale: float = 1.0) -> dict:
    """What an engine is asked right after its start: batches of equal sizes, one after the other, for a minute."""
    rng = random.Random("first minute")
    sizes = [(max(4, round(scale * num_in)), max(1, round(scale * num_out))) for num_in, num_out in FIRST_MINUTE_BATCH]
    batches = [
        [dataclasses.asdict(Request(prompt(rng, vocab_size, num_in), num_out)) for num_in, num_out in sizes]
        for _ in range(MOST_BATCHES)
    ]
    return {"seconds": 60 * scale, "batches": batches}


def longest(requests: list[Request]) -> int:
    return max(len(request.prompt_token_ids) + request.max_tokens for request in requests)
