"""One pass of a head that drafts (`interface.Head`) over the tokens of a step, with its paged caches.

A head's input for a token is that token, and the feature of the token before it. It has two caches: keys and values,
and the features, a vector for each token, so that the feature before a request's first token of a step is found
wherever it was computed: in the step before, by somebody with the same beginning, or by the head itself, whose output
stands in for features behind the newest token while it drafts. Drafting writes over none that is right.

The first token of a request has no token before it, and no place in the sequences that heads are trained with. Its key
is masked for all queries, and positions are counted from the second.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.kv_cache_spec import AttentionSpec, CacheSpec, LatentSpec
from jaxpaged.layers.attention import MASK_DIM, KVTensor
from jaxpaged.layers.embedding import Table, embed
from jaxpaged.layers.rope import rope_cos_sin
from jaxpaged.layers.token_vectors import vectors_before, write_vectors
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, Head, LayerContext
from jaxpaged.params.sharding import kv_heads_on_devices


def cache_specs(config: DecoderConfig, block_size: int, dtype_bytes: int, num_model_shards: int) -> list[CacheSpec]:
    """Keys and values, then features."""
    num_kv_heads = kv_heads_on_devices(config.num_kv_heads, num_model_shards)
    copies = num_kv_heads // config.num_kv_heads
    return [
        AttentionSpec(block_size, num_kv_heads, config.head_dim + MASK_DIM, dtype_bytes, head_copies=copies),
        LatentSpec(block_size, config.hidden_size, dtype_bytes),
    ]


def remember(batch: Batch, kv: Sequence[KVTensor], features_TD: jax.Array) -> list[KVTensor]:
    """The caches with the features of this step's tokens. `batch.caches` are the head's."""
    (_, (group, tensor)), kv = batch.caches, list(kv)
    kv[tensor] = write_vectors(kv[tensor], batch.attention[group].metadata, features_TD)
    return kv


def forward(
    head: Head, params: Any, table_VD: Table, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
) -> tuple[jax.Array, jax.Array, list[KVTensor]]:
    """(hidden_TD, features_TD, kv): see `Head.forward`. The features before this step's tokens are in the cache."""
    ((group, tensor), (of_features, features)), kv = batch.caches, list(kv)
    (layer,), num_tokens = config.layers, len(batch.tokens_T)
    before_TD = vectors_before(kv[features], batch.attention[of_features].metadata, num_tokens)
    embedded_TD = embed(batch.tokens_T, table_VD, None)
    assert layer.rope is not None, "heads rotate"
    cos_sin = rope_cos_sin(layer.rope, jnp.maximum(batch.positions_T - 1, 0), config.max_model_len)
    context = LayerContext(batch.attention[group].replace(masked_T=batch.positions_T == 0), cos_sin)
    before_TD = before_TD.astype(embedded_TD.dtype)
    hidden_TD, features_TD, kv[tensor] = head.forward(params, config, embedded_TD, before_TD, kv[tensor], context)
    return hidden_TD, features_TD, kv
