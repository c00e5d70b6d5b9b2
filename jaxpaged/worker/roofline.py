"""How fast a model can be at most on a device, from bytes and operations that no implementation can avoid.

A step takes at least as long as its slowest part (Williams, Waterman and Patterson, "Roofline", 2009): reading the
weights and the KV cache once, multiplying, or adding up partial results between devices. Parts are taken to overlap
perfectly, so real engines stay below. This module knows numbers only.
"""

from dataclasses import dataclass

from jaxpaged.plan import DeviceFacts, Speed


@dataclass(frozen=True)
class Work:
    """What a token costs on one of `num_shards` devices.

    weight_bytes: read by a decode step, embeddings that are only looked up left out. params: numbers of one device
    that every token is multiplied with, `head_params` those of the output head. num_attention_layers:
    (window or None, layers). heads: query heads x head_dim of one device. kv_token_bytes: of one token, per layer.
    reduced_bytes: what is summed over the devices per token in all layers.
    """

    num_shards: int
    weight_bytes: int
    params: int
    head_params: int
    attention_layers: tuple[tuple[int | None, int], ...]
    heads: int
    kv_token_bytes: int
    reduced_bytes: int


def decode_speed(work: Work, device: DeviceFacts, num_requests: int, context: int) -> Speed:
    """A step in which `num_requests` requests of `context` tokens get one token each."""
    seen = sum(min(window or context, context) * layers for window, layers in work.attention_layers)
    parts = {
        "memory": (work.weight_bytes + num_requests * seen * work.kv_token_bytes) / device.bandwidth,
        "matmul": num_requests * (2 * work.params + 4 * seen * work.heads) / device.matmul_bf16,
        "links": link_seconds(work, device, num_requests),
    }
    return speed(num_requests, context, num_requests, parts)


def prefill_speed(work: Work, device: DeviceFacts, num_tokens: int) -> Speed:
    """One prompt of `num_tokens` tokens, computed in as few steps as it likes; only its last token has logits."""
    pairs = 0.0
    for window, layers in work.attention_layers:
        width = min(window or num_tokens, num_tokens)
        pairs += layers * (width * (width + 1) / 2 + (num_tokens - width) * width)
    flops = 2 * (work.params - work.head_params) * num_tokens + 4 * pairs * work.heads + 2 * work.head_params
    parts = {
        "memory": work.weight_bytes / device.bandwidth,
        "matmul": flops / device.matmul_bf16,
        "links": link_seconds(work, device, num_tokens),
    }
    return speed(1, num_tokens, num_tokens, parts)


def link_seconds(work: Work, device: DeviceFacts, num_tokens: int) -> float:
    """A ring all-reduce sends every byte 2 (n - 1) / n times."""
    if work.num_shards == 1 or not device.links:
        return 0.0
    return 2 * (work.num_shards - 1) / work.num_shards * num_tokens * work.reduced_bytes / device.links


def speed(num_requests: int, context: int, num_tokens: int, parts: dict[str, float]) -> Speed:
    limit = max(parts, key=parts.__getitem__)
    return Speed(num_requests, context, num_tokens / parts[limit], limit)
