"""Llama 4, text: three of four layers rotate and see no further than their chunk of positions, the fourth sees all.

Layers with experts have one that all tokens share; a token goes to one more, which gets it weighed by a sigmoid. What
the model is has no paper: these are the definitions of transformers, and of arXiv 2501.19399 for the queries of layers
that do not rotate.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.experts import SIGMOID, Experts, RouterConfig
from jaxpaged.layers.mlp import Mlp
from jaxpaged.layers.rope import QueryGrowth
from jaxpaged.models import llama
from jaxpaged.models.config import FULL, DecoderConfig, ExpertsConfig, HfFields, short, without_rotation
from jaxpaged.models.decoder import decoder_specs, mlp_with_bias, pre_norm_config
from jaxpaged.models.expert_specs import check_experts, shared_mlp, stacked_expert_specs
from jaxpaged.models.wrapped import text_part

CHUNKED = "chunked_attention"
"""What `layer_types` calls layers with chunks."""

DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields that config.json may leave out."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Llama 4's config.json, of a text model or of the text part of one that also sees images.

    Dense blocks are `intermediate_size_mlp` wide, experts `intermediate_size`.
    """
    given = {**DEFAULTS, **text_part(hf)}
    width, width_of_dense = (HfFields(given).count(*field) for field in WIDTHS)
    fields = HfFields({**given, "intermediate_size": width_of_dense})
    fields.read.add("intermediate_size_mlp")
    num_layers = fields.count("num_hidden_layers")
    rotates = flags_of_layers(fields)
    has_bias = fields.flag("attention_bias", False)
    experts = ExpertsConfig(
        num_experts=fields.count("num_local_experts", 16),
        width=width,
        router=RouterConfig(fields.count("num_experts_per_tok", 1), SIGMOID, weighs_inputs=True),
        layers=sparse_layers(fields),
        shared_width=width,
    )
    chunks = chunks_of_layers(fields, rotates)
    growth: QueryGrowth | None = QueryGrowth(fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1))
    if not fields.value("attn_temperature_tuning", True):  # published ones have true, false or a number
        growth = None
    config = pre_norm_config(
        fields,
        [None] * num_layers,
        norm_eps=1e-5,
        qkv_bias=has_bias,
        o_bias=has_bias,
        experts=check_experts(experts),
        interleaved_rope=True,
        rotated_norm=fields.flag("use_qk_norm", True),
        query_growth=growth,
    )
    layers = [replace(layer, chunk=chunk) for layer, chunk in zip(config.layers, chunks, strict=True)]
    config = replace(config, layers=tuple(layers))
    return without_rotation(config, {i for i in range(num_layers) if not rotates[i]})


WIDTHS = (("intermediate_size", 8192), ("intermediate_size_mlp", 16_384))


def flags_of_layers(fields: HfFields) -> list[int]:
    """A 1 for each layer that rotates, and a 0 for the others; an empty `no_rope_layers` says nothing."""
    num_layers, every = fields.count("num_hidden_layers"), fields.count("no_rope_layer_interval", 4)
    rotates = [int((i + 1) % every != 0) for i in range(num_layers)]
    return fields.of_layers("no_rope_layers", (0, 1), rotates) if fields.value("no_rope_layers") else rotates


def chunks_of_layers(fields: HfFields, rotates: list[int]) -> list[int | None]:
    """The chunk of each layer: as `layer_types` says, or else of those that rotate."""
    chunk = fields.count_or_none("attention_chunk_size", 8192)
    defaults = [CHUNKED if flag else FULL for flag in rotates]
    types = fields.of_layers("layer_types", (CHUNKED, FULL), defaults)
    return [chunk if kind == CHUNKED else None for kind in types]


def sparse_layers(fields: HfFields) -> tuple[int, ...]:
    """Layers with experts: those of `moe_layers`, or else every `interleave_moe_layer_step`th."""
    num_layers, step = fields.count("num_hidden_layers"), fields.count("interleave_moe_layer_step", 1)
    layers = fields.value("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < num_layers for i in layers):
        raise CheckpointError(
            f"config.json: moe_layers is {short(layers)}; it must be a list of layers, of which there are {num_layers}."
        )
    return tuple(layers)


def feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp | Experts:
    """Specs of the feed-forward block of a layer."""
    name = f"{name}.feed_forward"
    if layer not in config.sparse_layers:
        return mlp_with_bias(config, name)
    return stacked_expert_specs(name, "router", shared_mlp(f"{name}.shared_expert"))


LLAMA4 = replace(
    llama.LLAMA,
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, feed_forward=feed_forward),
)
