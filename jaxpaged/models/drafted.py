"""A decoder and the model that drafts for it, as one: every pass over tokens is a pass of both.

So the draft model's keys and values are there wherever the decoder's are, in layers of their own behind those of the
decoder: a cached prefix, a request that was preempted, and a run of decode steps need nothing of their own, and what a
wrong draft wrote is written over like the decoder's. It costs a pass of the small model in each step, whose last layer
ends with its keys and values, since nobody reads what comes after them.

Drafting itself is elsewhere; this module does not know how it is done.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import struct

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import KVTensor
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, DraftModel, Model


@struct.dataclass
class DraftedParams:
    """All parameters: those of the decoder, whose tokens are the answer, and those of the model that drafts."""

    decoder: Any
    draft: Any


def drafted_model(model: Model, draft: DraftModel) -> Model:
    """The decoder with its draft model beside it; its `param_specs` stay those of the decoder alone."""
    return replace(
        model,
        forward=partial(forward, model, draft),
        head=partial(decoder_head, model),
        attention_specs=partial(attention_specs, model, draft),
    )


def forward(
    model: Model, draft: DraftModel, params: DraftedParams, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
) -> tuple[jax.Array, list[KVTensor]]:
    """The decoder's hidden states, and the KV tensors with this step's tokens of both models.

    The second pass begins when the first is over. Keys of its first layer follow from tokens alone, so XLA would write
    them while layers of the first pass still read the array that both share, and copy all of it before. And in
    `deterministic` engines nothing of both may be fused.
    """
    own, others = batch.caches[: config.num_layers], batch.caches[config.num_layers :]
    hidden_TD, kv = model.forward(params.decoder, config, batch.replace(caches=own), kv)
    again = batch.replace(caches=others)
    hidden_TD, tokens_T, positions_T = jax.lax.optimization_barrier((hidden_TD, batch.tokens_T, batch.positions_T))
    again = again.replace(tokens_T=tokens_T, positions_T=positions_T)
    _, kv = draft.model.forward(params.draft, draft.config, again, kv)
    return hidden_TD, kv


def decoder_head(model: Model, params: DraftedParams) -> Any:
    return model.head(params.decoder)


def attention_specs(
    model: Model, draft: DraftModel, config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[AttentionSpec]:
    """What the decoder's layers cache, then what the draft model's do."""
    sizes = (block_size, dtype_bytes, num_model_shards)
    return [*model.attention_specs(config, *sizes), *draft.model.attention_specs(draft.config, *sizes)]
