"""A decoder with a tower beside it, as one model: both come from one checkpoint, and each has programs of its own.

The decoder reads the tower's embeddings from the step's data (`Batch.visual_TE`); it knows no tower.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.attention import KVTensor
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Batch, ForwardOutput, Model
from jaxpaged.models.vision.interface import Vision


@struct.dataclass
class SeeingParams:
    """All parameters: those of the decoder, and those of the tower, which only encode programs need."""

    decoder: Any
    vision: Any


def seeing_model(model: Model) -> Model:
    """The model with its tower; for a config.json that describes no tower, the model of text."""
    return replace(
        model,
        config_from_hf=partial(config_from_hf, model),
        param_specs=partial(param_specs, model),
        forward=partial(forward, model),
        head=partial(head, model),
    )


def tower_of(params: Any) -> Any:
    """The parameters of the tower, of all parameters of a model that sees; they may be those of one that pools."""
    return params.vision if isinstance(params, SeeingParams) else params.decoder.vision


def without_tower(params: Any) -> Any:
    """What programs of tokens need of such parameters."""
    if isinstance(params, SeeingParams):
        return params.replace(vision=None)
    return params.replace(decoder=params.decoder.replace(vision=None))


def config_from_hf(model: Model, hf: dict[str, Any]) -> DecoderConfig:
    assert model.vision is not None, f"{model.architectures} sees nothing"
    return replace(model.config_from_hf(hf), vision=model.vision.config_from_hf(hf))


def param_specs(model: Model, config: DecoderConfig, num_model_shards: int) -> SeeingParams:
    """Specs of both."""
    assert model.vision is not None and config.vision is not None, f"{config.architecture} has no tower"
    return SeeingParams(
        model.param_specs(config, num_model_shards), model.vision.param_specs(config.vision, num_model_shards)
    )


def forward(
    model: Model,
    params: SeeingParams,
    config: DecoderConfig,
    batch: Batch,
    kv: Sequence[KVTensor],
    taps: tuple[int, ...] = (),
) -> ForwardOutput:
    return model.forward(params.decoder, config, batch, kv, taps)


def head(model: Model, params: SeeingParams) -> Any:
    return model.head(params.decoder)


# ---- a decoder alone, which embeddings come to -----------------------------------------------------


def without_encoder(model: Model) -> Model:
    """A model that sees without the weights of its tower: others compute embeddings for it."""
    return replace(model, param_specs=partial(specs_of_decoder, model))


def specs_of_decoder(model: Model, config: DecoderConfig, num_model_shards: int) -> SeeingParams:
    return model.param_specs(config, num_model_shards).replace(vision=None)


# ---- a tower alone -------------------------------------------------------------------------------


def without_decoder(model: Model, config: DecoderConfig) -> tuple[Model, DecoderConfig]:
    """Its tower alone. In place of the decoder is a layer that has no weights and computes nothing, so that steps are
    what they are, and cost nothing; what it gives for a prompt is a zero. Raises CheckpointError where nothing sees."""
    if model.vision is None or config.vision is None:
        raise CheckpointError(
            f"the model ({config.architecture}) has no encoder of pictures, which is all that mm_encoder_only loads."
        )
    config = replace(config, num_layers=1, layers=config.layers[:1], experts=None, num_mtp_layers=0)
    model = replace(
        model,
        param_specs=partial(specs_of_tower, model.vision),
        forward=compute_nothing,
        head=lambda params: None,
        compute_logits=one_number,
        mtp=None,
    )
    return model, config


def specs_of_tower(vision: Vision, config: DecoderConfig, num_model_shards: int) -> SeeingParams:
    assert config.vision is not None, "a tower alone has a description"
    return SeeingParams(None, vision.param_specs(config.vision, num_model_shards))


def compute_nothing(
    params: SeeingParams, config: DecoderConfig, batch: Batch, kv: Sequence[KVTensor], taps: tuple[int, ...] = ()
) -> ForwardOutput:
    shape = len(batch.tokens_T), config.hidden_size
    return ForwardOutput(jnp.zeros(shape, jnp.dtype(config.dtype)), list(kv))


def one_number(head: None, config: DecoderConfig, hidden_SD: jax.Array) -> jax.Array:
    return hidden_SD[:, :1].astype(jnp.float32)
