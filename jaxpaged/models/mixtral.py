"""Mixtral: Mistral's layers with experts, whose weights add up to one (arXiv 2401.04088)."""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.experts import Experts, RouterConfig
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.expert_specs import check_experts, expert_specs


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Mixtral's config.json. Experts are as wide as `intermediate_size` says."""
    fields = HfFields({"rope_theta": 1_000_000.0, **hf})
    num_layers = fields.count("num_hidden_layers")
    experts = ExpertsConfig(
        num_experts=fields.count("num_local_experts", 8),
        width=fields.count("intermediate_size"),
        router=RouterConfig(fields.count("num_experts_per_tok", 2), is_normalised=True),
        layers=tuple(range(num_layers)),
    )
    windows = [fields.count_or_none("sliding_window")] * num_layers
    return pre_norm_config(fields, windows, norm_eps=1e-5, experts=check_experts(experts))


def feed_forward(config: DecoderConfig, name: str, layer: int) -> Experts:
    return expert_specs(config, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))


MIXTRAL = replace(
    llama.LLAMA,
    architectures=("MixtralForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, feed_forward=feed_forward),
)
