"""What a model module gives to the rest: a `Model`, a record of pure functions.

    model = registry.model_for(hf)                        # hf: the raw config.json as a dict
    config = model.config_from_hf(hf)
    specs = model.param_specs(config, num_model_shards)   # pytree of Spec
    params = load_params(specs, config, folder, mesh, dtype)
    output = model.forward(params, config, batch, kv)
    logits_SV = model.compute_logits(model.head(params), config, output.hidden_TD[rows_that_sample])

Before use, `config = dataclasses.replace(config, max_model_len=...)` with the engine's limit: some rope scalings
depend on it. Models know nothing of requests, blocks or programs: the KV tensors and `batch.attention` pass through
to `layers.attention.attend`.

Letters: in `visual_TE` E are the numbers of an encoder's embedding; 3 are the positions in time, rows and columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Protocol

import jax
from flax import struct

from jaxpaged.kv_cache_spec import CacheSpec
from jaxpaged.layers.attention import AttentionBatch, KVTensor
from jaxpaged.layers.dense_attention import DenseBatch
from jaxpaged.layers.experts import Routed
from jaxpaged.layers.rope import CosSin
from jaxpaged.layers.state import StateBatch, StateTensor
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.vision.interface import Vision


@struct.dataclass
class Batch:
    """What a step asks of a model besides its parameters and the KV cache.

    `tokens_T` and `positions_T` are int32: which token, and where in its request; padding is token 0 at position 0.
    `attention` has an entry per KV group. `caches` has one per layer: the index of its group, and of its KV tensor.
    `stream_TD`: what the layers of earlier stages made of the tokens, where these are not the first layers.
    `visual_TE`: in models that see, what stands in place of the embeddings of tokens where `is_visual_T`: [T, D * (1 +
    levels)], the encoder's embedding and one vector for each of the first layers, which is added behind that layer.
    `rope_offsets_3T` is added to positions where a rotation has three of them: int32 [3, T].
    """

    tokens_T: jax.Array
    positions_T: jax.Array
    attention: tuple[AttentionBatch | StateBatch | DenseBatch, ...]
    caches: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)
    stream_TD: jax.Array | None = None
    visual_TE: jax.Array | None = None
    is_visual_T: jax.Array | None = None
    rope_offsets_3T: jax.Array | None = None


@struct.dataclass
class LayerContext:
    """What one layer is told of a step besides its parameters, its input and its cache.

    `cos_sin` are of the tokens' angles, in the layer's own rotation, if it has one. `query_factor_T`: what queries are
    multiplied by, in layers whose queries grow with positions (`QueryGrowth`).
    """

    attention: AttentionBatch | StateBatch | DenseBatch
    cos_sin: CosSin | None
    query_factor_T: jax.Array | None = None


@struct.dataclass
class LayerOutput:
    """What a layer makes of a step: the residual stream [T, D], and its cache with this step's tokens.

    `routed`: what a block of experts tells of the tokens.
    """

    x_TD: jax.Array
    kv: KVTensor | StateTensor
    routed: Routed | None = None


@struct.dataclass
class ForwardOutput:
    """What a model makes of a step: hidden states after the final norm, and the KV tensors with this step's tokens.

    `taps`: the residual stream [T, D] before each layer that the caller named. `routed`: what the blocks of experts
    tell of the tokens, along a first axis of these blocks.
    """

    hidden_TD: jax.Array
    kv: list[KVTensor]
    taps: tuple[jax.Array, ...] = ()
    routed: Routed | None = None


class Forward(Protocol):
    """The function of one pass over the tokens of a step."""

    def __call__(
        self,
        params: Any,
        config: DecoderConfig,
        batch: Batch,
        kv: Sequence[KVTensor],
        taps: tuple[int, ...] = (),
    ) -> ForwardOutput: ...


@dataclass(frozen=True)
class Classifier:
    """What makes scores of a pooled vector, where that is no plain product: `specs(config)` -> pytree of Spec, and
    `scores(params, config, pooled_SD)` -> float32 [S, Y], of float32 vectors."""

    specs: Callable[[Any], Any]
    scores: Callable[[Any, Any, jax.Array], jax.Array]


@dataclass(frozen=True)
class Model:
    """One architecture.

    `config_from_hf(hf)` -> DecoderConfig; CheckpointError for what is missing or not supported.
    `param_specs(config, num_model_shards)` -> pytree of Spec, shaped like the parameters.
    `forward(params, config, batch, kv, taps=())` -> ForwardOutput. Layer i reads and writes `kv[tensor]` under
        `batch.attention[group]`, where `(group, tensor) = batch.caches[i]`. T must be at least 2: on CPU a product with
        one row is several times slower. `taps` are layers whose input a head that drafts wants.
    `head(params)` -> what `compute_logits` needs of the parameters.
    `compute_logits(head, config, hidden_SD)` -> float32 logits_SV; columns that only pad the vocabulary are -inf.
    `attention_specs(config, block_size, dtype_bytes, num_model_shards)` -> a CacheSpec for each layer; key heads
        are counted after they were repeated for the shards.
    `mtp`: the layer of the same checkpoint that can draft tokens, if the architecture has one; its config is made of
        the decoder's. `draft`: what drafts tokens for this model, if a model or a head does.
    `vision`: the family of its tower, where the model sees; then `config_from_hf` gives a config with `vision`, and
        the parameters are `SeeingParams` (`seeing.py`).
    `classifier`: of a model whose classifiers have another one than the product with `score.weight`.
    """

    architectures: tuple[str, ...]
    config_from_hf: Callable[[dict[str, Any]], DecoderConfig]
    param_specs: Callable[[DecoderConfig, int], Any]
    forward: Forward
    head: Callable[[Any], Any]
    compute_logits: Callable[[Any, DecoderConfig, Any], Any]
    attention_specs: Callable[[DecoderConfig, int, int, int], Sequence[CacheSpec]]
    mtp: Optional["Head"] = None
    draft: Optional["DraftModel"] = None
    vision: Vision | None = None
    classifier: Classifier | None = None


@dataclass(frozen=True)
class HeadConfig(DecoderConfig):
    """Of a head that drafts. `taps`: layers before which it reads the decoder's residual stream."""

    taps: tuple[int, ...] = ()

    def dim_sizes(self) -> dict[str, int]:
        return {**super().dim_sizes(), "Z": 2 * self.hidden_size}


@dataclass(frozen=True)
class Head:
    """A layer that drafts from the hidden states of a decoder (EAGLE, multi-token prediction).

    What it knows of the past is one vector for each token, the feature: `features` makes it of the decoder's hidden
    states, and where there are none yet, behind the newest token, the layer's own output takes its place.

    `param_specs(config, num_model_shards)` -> pytree of Spec, with `embed_tokens`: None where the decoder's serve.
    `features(params, config, hidden_TD, taps)` -> [T, D], of the final hidden states and the tapped residual streams.
    `forward(params, config, embedded_TD, before_TD, kv, batch)` -> (hidden_TD for `compute_logits`, the features in
        place of the decoder's, kv); `before_TD` are the features of the tokens before these.
    `head(params, table_VD)` -> what `compute_logits` needs of the parameters, and of the decoder's table of logits.
    `compute_logits(head, config, hidden_SD)` -> float32 logits_SV over the decoder's vocabulary, as wide as its own;
        -inf for tokens that the head does not know.
    """

    param_specs: Callable[[Any, int], Any]
    features: Callable[[Any, Any, jax.Array, tuple[jax.Array, ...]], jax.Array]
    forward: Callable[[Any, Any, jax.Array, jax.Array, KVTensor, LayerContext], tuple[jax.Array, jax.Array, KVTensor]]
    head: Callable[[Any, Any], Any]
    compute_logits: Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class DraftModel:
    """What drafts tokens for a model of the same vocabulary: another model, or a head. `quantization` is that of its
    weights, which lie in `folder`."""

    model: Model | Head
    config: DecoderConfig
    folder: Path
    quantization: str | None = None
