"""A decoder and what drafts for it, a model or a head, as one: every pass over tokens is a pass of both.

So the layers that draft have their keys and values wherever the decoder has its own, in layers behind those of the
decoder: a cached prefix, a request that was preempted, and a run of decode steps need nothing of their own, and what a
wrong draft wrote is written over like the decoder's. It costs a pass of a small model in each step, whose last layer
ends with its keys and values, since nobody reads what comes after them.

Drafting itself is elsewhere; this module does not know how it is done. `heads.py` has what heads need.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import struct

from jaxpaged.kv_cache_spec import CacheSpec
from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import plain_table
from jaxpaged.models import heads
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, DraftModel, ForwardOutput, Head, Model


@struct.dataclass
class DraftedParams:
    """All parameters: those of the decoder, whose tokens are the answer, and those of what drafts."""

    decoder: Any
    draft: Any


def drafted_model(model: Model, draft: DraftModel) -> Model:
    """The decoder with what drafts beside it; its `param_specs` stay those of the decoder alone."""
    return replace(
        model,
        forward=partial(forward, model, draft),
        head=partial(decoder_head, model),
        attention_specs=partial(attention_specs, model, draft),
    )


def drafting_model(model: Model, draft: DraftModel) -> Model:
    """What drafts as a model of its own, on the parameters of both, whose `batch.caches` are those behind the
    decoder's. Its config is `draft.config`."""
    own = draft.model
    passes = head_pass if isinstance(own, Head) else model_pass
    return replace(
        model, forward=partial(passes, own), head=partial(draft_head, model, own), compute_logits=own.compute_logits
    )


def forward(
    model: Model, draft: DraftModel, params: DraftedParams, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
) -> ForwardOutput:
    """The decoder's output, with this step's tokens of both in the KV tensors.

    The second pass begins when the first is over. Keys of its first layer follow from tokens alone, so XLA would write
    them while layers of the first pass still read the array that both share, and copy all of it before. And in
    `deterministic` engines nothing of both may be fused.
    """
    taps = getattr(draft.config, "taps", ())
    own, others = batch.caches[: config.num_caches], batch.caches[config.num_caches :]
    output = model.forward(params.decoder, config, batch.replace(caches=own), kv, taps)
    hidden_TD, tapped, tokens_T, positions_T = jax.lax.optimization_barrier(
        (output.hidden_TD, output.taps, batch.tokens_T, batch.positions_T)
    )
    again = batch.replace(caches=others, tokens_T=tokens_T, positions_T=positions_T)
    if isinstance(draft.model, Head):
        features_TD = draft.model.features(params.draft, draft.config, hidden_TD, tapped)
        kv = heads.remember(again, output.kv, features_TD)
        _, _, kv = heads.forward(draft.model, params.draft, embeddings(params), draft.config, again, kv)
    else:
        kv = model_pass(draft.model, params, draft.config, again, output.kv).kv
    return output.replace(hidden_TD=hidden_TD, kv=kv, taps=())


def model_pass(
    own: Model, params: DraftedParams, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
) -> ForwardOutput:
    """`Model.forward` of a model that drafts."""
    return own.forward(params.draft, config, batch, kv)


def head_pass(
    own: Head, params: DraftedParams, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
) -> ForwardOutput:
    """The same of a head, whose output stands for what the decoder has not computed yet."""
    hidden_TD, features_TD, kv = heads.forward(own, params.draft, embeddings(params), config, batch, kv)
    return ForwardOutput(hidden_TD, heads.remember(batch, kv, features_TD))


def embeddings(params: DraftedParams) -> Any:
    """The table from which a head takes embeddings, which are the base's."""
    own = params.draft.embed_tokens
    return plain_table(params.decoder.embed_tokens) if own is None else own


def decoder_head(model: Model, params: DraftedParams) -> Any:
    return model.head(params.decoder)


def draft_head(model: Model, own: Model | Head, params: DraftedParams) -> Any:
    """What the logits of drafts are computed with."""
    return own.head(params.draft, model.head(params.decoder)) if isinstance(own, Head) else own.head(params.draft)


def attention_specs(
    model: Model, draft: DraftModel, config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int
) -> list[CacheSpec]:
    """What the decoder's layers cache, then what those do that draft."""
    sizes = (block_size, dtype_bytes, num_model_shards)
    own = heads.cache_specs if isinstance(draft.model, Head) else draft.model.attention_specs
    return [*model.attention_specs(config, *sizes), *own(draft.config, *sizes)]
