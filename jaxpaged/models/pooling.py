"""A model whose hidden states are the result: for embeddings as they are, for classifiers after one more product, or
what the architecture has in its place.

`pooling_model` makes a `Model` of a language model's, or of an encoder's. Which tokens' hidden states count is not
known here.
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
from jaxpaged.models.encoder import Encoder
from jaxpaged.models.interface import Batch, Classifier, Forward, ForwardOutput, Model
from jaxpaged.models.seeing import SeeingParams
from jaxpaged.params.quantized import QuantizedArray
from jaxpaged.params.spec import Spec


@struct.dataclass
class PoolingModel:
    """All parameters: a decoder without a head, and the classifier if there is one, [Y, D] as a rule."""

    decoder: Decoder | SeeingParams | Encoder
    score: Any


def pooling_model(model: Model, convert: str) -> Model:
    """The same layers for `convert` "embed" or "classify"; `compute_logits` gives float32 vectors [S, D] or [S, Y]."""
    classifier = (model.classifier or PLAIN) if convert == "classify" else None
    return replace(
        model,
        param_specs=partial(pooling_specs, model.param_specs, classifier),
        forward=partial(forward, model.forward),
        head=score_params,
        compute_logits=partial(pooled, classifier),
    )


def pooling_specs(
    decoder_specs: Callable[[DecoderConfig, int], Any],
    classifier: Classifier | None,
    config: DecoderConfig,
    num_shards: int,
) -> PoolingModel:
    specs = without_head(decoder_specs(config, num_shards))
    return PoolingModel(specs, None if classifier is None else classifier.specs(config))


def without_head(specs: Any) -> Any:
    """Specs of a model that has no table of logits."""
    if isinstance(specs, SeeingParams):
        return specs.replace(decoder=without_head(specs.decoder))
    return specs if isinstance(specs, Encoder) else specs.replace(lm_head=None)


def forward(
    decoder_forward: Forward,
    params: PoolingModel,
    config: DecoderConfig,
    batch: Batch,
    kv: Sequence[KVTensor],
    taps: tuple[int, ...] = (),
) -> ForwardOutput:
    return decoder_forward(params.decoder, config, batch, kv, taps)


def score_params(params: PoolingModel) -> Any:
    return params.score


def pooled(classifier: Classifier | None, score: Any, config: DecoderConfig, hidden_SD: jax.Array) -> jax.Array:
    """Float32: the hidden states themselves [S, D], or a score per label [S, Y]."""
    hidden_SD = hidden_SD.astype(jnp.float32)
    return hidden_SD if classifier is None else classifier.scores(score, config, hidden_SD)


def plain_specs(config: DecoderConfig) -> Spec:
    """A classifier has few labels, so it is whole on every device."""
    return Spec("YD", "Y D", "score.weight")


def plain_scores(score_YD: Table, config: DecoderConfig, pooled_SD: jax.Array) -> jax.Array:
    table_YD = score_YD if isinstance(score_YD, QuantizedArray) else score_YD.astype(jnp.float32)
    return vocabulary_logits(pooled_SD, table_YD, config.num_labels, None)


PLAIN = Classifier(plain_specs, plain_scores)
"""Of language models."""
