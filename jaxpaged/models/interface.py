"""What a model module gives to the rest: a `Model`, a record of pure functions.

    model = registry.model_for(hf)                        # hf: the raw config.json as a dict
    config = model.config_from_hf(hf)
    specs = model.param_specs(config, num_model_shards)   # pytree of Spec
    params = load_params(specs, config, folder, mesh, dtype)
    hidden_TD, kv = model.forward(params, config, batch, kv)
    logits_SV = model.compute_logits(model.head(params), config, hidden_TD[rows_that_sample])

Before use, `config = dataclasses.replace(config, max_model_len=...)` with the engine's limit: some rope scalings
depend on it. Models know nothing of requests, blocks or programs: the KV tensors and `batch.attention` pass through
to `layers.attention.attend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Protocol

import jax
from flax import struct

from jaxpaged.kv_cache_spec import AttentionSpec
from jaxpaged.layers.attention import AttentionBatch, KVTensor
from jaxpaged.layers.rope import CosSin
from jaxpaged.models.config import DecoderConfig


@struct.dataclass
class Batch:
    """What a step asks of a model besides its parameters and the KV cache.

    `tokens_T` and `positions_T` are int32: which token, and where in its request; padding is token 0 at position 0.
    `attention` has an entry per KV group. `caches` has one per layer: the index of its group, and of its KV tensor.
    """

    tokens_T: jax.Array
    positions_T: jax.Array
    attention: tuple[AttentionBatch, ...]
    caches: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)


@struct.dataclass
class LayerBatch:
    """The part of a `Batch` that one layer needs. `cos_sin` are of the tokens' angles, in the layer's own rotation."""

    attention: AttentionBatch
    cos_sin: CosSin


class Forward(Protocol):
    """The function of one pass over the tokens of a step."""

    def __call__(
        self, params: Any, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor]
    ) -> tuple[jax.Array, list[KVTensor]]:
        """(hidden_TD after the final norm, the KV tensors with this step's tokens)."""
        ...


@dataclass(frozen=True)
class Model:
    """One architecture.

    `config_from_hf(hf)` -> DecoderConfig; CheckpointError for what is missing or not supported.
    `param_specs(config, num_model_shards)` -> pytree of Spec, shaped like the parameters.
    `forward(params, config, batch, kv)` -> (hidden_TD, kv): hidden states after the final norm. Layer i reads and
        writes `kv[tensor]` under `batch.attention[group]`, where `(group, tensor) = batch.caches[i]`. T must be at
        least 2: on CPU a product with one row is several times slower.
    `head(params)` -> what `compute_logits` needs of the parameters.
    `compute_logits(head, config, hidden_SD)` -> float32 logits_SV; columns that only pad the vocabulary are -inf.
    `attention_specs(config, block_size, dtype_bytes, num_model_shards)` -> one AttentionSpec per layer; key heads
        are counted after they were repeated for the shards.
    `draft`: a smaller model that drafts tokens for this one, if one does.
    """

    architectures: tuple[str, ...]
    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    param_specs: Callable[[DecoderConfig, int], Any]
    forward: Forward
    head: Callable[[Any], Any]
    compute_logits: Callable[[Any, DecoderConfig, Any], Any]
    attention_specs: Callable[[DecoderConfig, int, int, int], list[AttentionSpec]]
    draft: Optional["DraftModel"] = None


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts tokens for another one, which has the same vocabulary. `quantization` is that of its weights,
    which lie in `folder`."""

    model: Model
    config: DecoderConfig
    folder: Path
    quantization: str | None = None
