"""How fast a model can be at most on a device, from bytes and operations that no implementation can avoid.

A step takes at least as long as its slowest part (Williams, Waterman and Patterson, "Roofline", 2009): reading the
weights and the KV cache once, multiplying, what the host does for it, or one kernel after another. Collectives during
which nothing else runs add to that; the others overlap, as all other parts are taken to do, perfectly, so real engines
stay below. Of several stages the slowest computes one step after the other, and no step ends before it has been on all
of them. This module knows numbers only.
"""

from collections.abc import Sequence

from jaxpaged.tools.planning.plan import DeviceFacts, Speed
from jaxpaged.worker.costs import Work

DISPATCH_SECONDS = 1.1e-4
"""Of the host, per program with one request: the fastest of `scripts/bench_host.py --running 1`, on two x86 cores."""
REQUEST_SECONDS = 3.2e-6
"""Of the host, per further request and step: the same script with 256 requests takes 3.6 us for each, all in all."""
KERNELS_PER_LAYER = 8
"""That wait for each other: two norms, query-key-value, attention, its output, gate-up, down, a sum."""
KERNEL_SECONDS = 1e-6
"""At least, from the start of a kernel to that of one that waits for it: launch of a GPU, or latency of memory."""


def decode_speed(
    stages: Sequence[Work], device: DeviceFacts, num_requests: int, context: int, step_bytes: Sequence[int] = ()
) -> Speed:
    """A step in which `num_requests` requests of `context` tokens get one token each, on one stage or several.

    `step_bytes` is what the programs of each stage move besides the KV cache, if that is known; never less than the
    weights. Requests take turns on stages: each step has a share of them.
    """
    in_step = -(-num_requests // len(stages))
    of_rank = -(-in_step // stages[0].num_ranks)  # stages have none
    parts_of = [
        decode_parts(work, device, in_step, context, moved)
        for work, moved in zip(stages, step_bytes or [0] * len(stages), strict=True)
    ]
    seconds, sent = stage_seconds(stages, device, of_rank, parts_of)
    num_steps = -(-num_requests // in_step)  # until all have a token: those of a step need it for their next one
    slowest = max(range(len(stages)), key=seconds.__getitem__)
    parts, host = parts_of[slowest], num_steps * parts_of[slowest]["host"]
    whole = max(num_steps * seconds[slowest], sum(seconds) + sent, host)
    return Speed(num_requests, context, num_requests / whole, limit_of(stages[slowest], device, of_rank, parts))


def decode_parts(work: Work, device: DeviceFacts, num_requests: int, context: int, step_bytes: int) -> dict[str, float]:
    """Seconds of the parts of a step on one stage. Experts meet the tokens of all ranks."""
    of_rank = -(-num_requests // work.num_ranks)
    of_others = (num_requests - of_rank) * work.expert_params
    moved = max(step_bytes, work.bytes_read(num_requests))
    in_layers = [(min(window or context, context) * n, token_bytes) for window, n, token_bytes in work.attention_layers]
    seen, read = sum(n for n, _ in in_layers), sum(n * token_bytes for n, token_bytes in in_layers)
    return {
        "memory": (moved + of_rank * read) / device.bandwidth,
        "matmul": (of_rank * (2 * work.params + 4 * seen * work.heads) + 2 * of_others) / device.matmul_bf16,
        "host": DISPATCH_SECONDS / work.steps_per_program + num_requests * REQUEST_SECONDS,
        "kernels": KERNELS_PER_LAYER * work.num_layers * KERNEL_SECONDS,
    }


def prefill_speed(stages: Sequence[Work], device: DeviceFacts, num_tokens: int, num_steps: int = 1) -> Speed:
    """One prompt of `num_tokens` tokens, computed in `num_steps` steps of about as much each; only its last token has
    logits."""
    parts_of = [prefill_parts(work, device, num_tokens, num_steps) for work in stages]
    seconds, sent = stage_seconds(stages, device, num_tokens / num_steps, parts_of)
    slowest = max(range(len(stages)), key=seconds.__getitem__)
    parts, host = parts_of[slowest], num_steps * parts_of[slowest]["host"]
    whole = max(sum(seconds) + sent + (num_steps - 1) * seconds[slowest], host)
    limit = limit_of(stages[slowest], device, num_tokens / num_steps, parts)
    return Speed(1, num_tokens, num_tokens / whole, limit)


def prefill_parts(work: Work, device: DeviceFacts, num_tokens: int, num_steps: int) -> dict[str, float]:
    """Seconds of the parts of one of these steps on one stage."""
    pairs = pairs_of(work, num_tokens)
    flops = 2 * (work.params - work.head_params) * num_tokens + 4 * pairs * work.heads + 2 * work.head_params
    return {
        "memory": work.bytes_read(num_tokens // num_steps) / device.bandwidth,
        "matmul": flops / device.matmul_bf16 / num_steps,
        "host": DISPATCH_SECONDS,
        "kernels": KERNELS_PER_LAYER * work.num_layers * KERNEL_SECONDS,
    }


def pairs_of(work: Work, num_tokens: int) -> float:
    """Pairs of a token of a prompt and one that it sees, in all layers."""
    pairs = 0.0
    for window, layers, _ in work.attention_layers:
        width = min(window or num_tokens, num_tokens)
        pairs += layers * (width * (width + 1) / 2 + (num_tokens - width) * width)
    return pairs


def link_seconds(work: Work, device: DeviceFacts, num_tokens: float) -> float:
    """A ring all-reduce sends every byte 2 (n - 1) / n times; what merges parts of contexts comes on top. So do, once a
    layer, the tokens of other ranks, which have as many, on their way to the experts and back."""
    if work.num_shards * work.num_ranks == 1 or not device.links:
        return 0.0
    reduced = (2 * (work.num_shards - 1) / work.num_shards + work.num_ranks - 1) * work.reduced_bytes
    return num_tokens * (reduced + work.merged_bytes) / device.links


def stage_seconds(
    stages: Sequence[Work], device: DeviceFacts, step_tokens: float, parts_of: Sequence[dict[str, float]]
) -> tuple[list[float], float]:
    """(The seconds that a step takes each stage, those in which hidden states go from stage to stage.)

    Parts of a device overlap. Collectives that are waited for do not: they add to its time.
    """
    links = [link_seconds(work, device, step_tokens) for work in stages]
    seconds = [
        max(max(seconds for name, seconds in parts.items() if name != "host") + work.waited_share * link, link)
        for work, parts, link in zip(stages, parts_of, links, strict=True)
    ]
    sent = sum(work.sent_bytes for work in stages) * step_tokens / device.links if device.links else 0.0
    return seconds, sent


def limit_of(work: Work, device: DeviceFacts, step_tokens: float, parts: dict[str, float]) -> str:
    """The longest part of a step."""
    parts = parts | {"links": link_seconds(work, device, step_tokens)}
    return max(parts, key=parts.__getitem__)
