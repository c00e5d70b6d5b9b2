"""A decoder whose hidden states are the result: for embeddings as they are, for classifiers after one more product.

`pooling_model` makes a `Model` of a language model's. Which tokens' hidden states count is not known here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.attention import KVTensor
from jaxpaged.layers.embedding import Table, vocabulary_logits
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.interface import Batch, Forward, ForwardOutput, Model
from jaxpaged.models.seeing import SeeingParams
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.params.spec import Spec


@struct.dataclass
class PoolingModel:
    """All parameters: a decoder without a head, and the classifier [Y, D] if there is one."""

    decoder: Decoder | SeeingParams
    score: Table | None


def pooling_model(model: Model, convert: str) -> Model:
    """The same layers for `convert` "embed" or "classify"; `compute_logits` gives float32 vectors [S, D] or [S, Y]."""
    return replace(
        model,
        param_specs=partial(pooling_specs, model.param_specs, convert == "classify"),
        forward=partial(forward, model.forward),
        head=score_table,
        compute_logits=pooled,
    )


def pooling_specs(
    decoder_specs: Callable[[DecoderConfig, int], Any], classifies: bool, config: DecoderConfig, num_shards: int
) -> PoolingModel:
    """A classifier has few labels, so it is whole on every device."""
    score = Spec("YD", "Y D", "score.weight") if classifies else None
    specs = decoder_specs(config, num_shards)
    if isinstance(specs, SeeingParams):
        return PoolingModel(specs.replace(decoder=specs.decoder.replace(lm_head=None)), score)
    return PoolingModel(specs.replace(lm_head=None), score)


def forward(
    decoder_forward: Forward,
    params: PoolingModel,
    config: DecoderConfig,
    batch: Batch,
    kv: Sequence[KVTensor],
    taps: tuple[int, ...] = (),
) -> ForwardOutput:
    return decoder_forward(params.decoder, config, batch, kv, taps)


def score_table(params: PoolingModel) -> Table | None:
    return params.score


def pooled(score_YD: Table | None, config: DecoderConfig, hidden_SD: jax.Array) -> jax.Array:
    """Float32: the hidden states themselves [S, D], or a score per label [S, Y]."""
    if score_YD is None:
        return hidden_SD.astype(jnp.float32)
    table_YD = score_YD if isinstance(score_YD, QuantizedArray) else score_YD.astype(jnp.float32)
    return vocabulary_logits(hidden_SD.astype(jnp.float32), table_YD, config.num_labels, None)
