"""The least that a program moves to and from main memory, by purpose, from the sizes of its model: what its bytes are
compared with."""

from dataclasses import dataclass

from jaxpaged.models.config import DecoderConfig
from jaxpaged.worker.costs import Work

LOGITS_ITEMSIZE = 4


@dataclass(frozen=True)
class Minimum:
    """Bytes of one device. weights: each once, of experts those that tokens go to, as if by chance. logits: written
    once and read once. activations: what products, attention and norms hand to each other. kv_written: keys and values
    of the step's tokens; kv_read: of its contexts."""

    weights: float = 0.0
    logits: float = 0.0
    activations: float = 0.0
    kv_written: float = 0.0
    kv_read: float = 0.0


def minimum_of(
    work: Work,
    decoder: DecoderConfig,
    itemsize: int,
    num_tokens: int,
    context_bytes: float,
    *,
    layers: bool,
    draws: bool,
) -> Minimum:
    """Of a program for so many tokens, each of them another row's where it `draws`. layers: whether it has those of the
    model. `itemsize`: of activations. `context_bytes`: of keys and values that its rows see."""
    weights = work.bytes_read(num_tokens) - work.head_bytes if layers else 0.0
    return Minimum(
        weights + (work.head_bytes if draws else 0),
        draws * 2.0 * num_tokens * decoder.vocab_size * LOGITS_ITEMSIZE / work.num_shards,
        layers * float(num_tokens * itemsize) * activations_of(decoder, work.num_shards),
        layers * float(num_tokens) * sum(count * token_bytes for _, count, token_bytes in work.attention_layers),
        layers * context_bytes,
    )


def activations_of(decoder: DecoderConfig, num_shards: int) -> float:
    """Numbers of a token that all layers write and read again: the residual stream, which both halves of a layer read
    and write; queries, keys, values and what attention gives; and what the feed-forward multiplies last."""
    latents, experts = decoder.latents, decoder.experts
    cached = latents.width if latents else 2 * decoder.num_kv_heads * decoder.head_dim / num_shards
    heads = 2 * decoder.num_heads * decoder.head_dim / num_shards
    dense, sparse = decoder.intermediate_size, 0
    if experts:
        sparse = experts.router.experts_per_token * experts.width + experts.shared_width
    num_sparse = len(experts.layers) if experts else 0
    fed = (decoder.num_layers - num_sparse) * dense + num_sparse * sparse
    return decoder.num_layers * (4 * decoder.hidden_size + 2 * heads + 2 * cached) + 2 * fed / num_shards
