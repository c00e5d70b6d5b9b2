"""Arcee's AFM, and Apertus: feed-forward blocks without a gate.

AFM's activation is the square of a ReLU (arXiv 2109.08668), in Llama's layers. Apertus's has two numbers that every
layer learned (xIELU, arXiv 2411.13010), and norms on query and key heads (arXiv 2509.14233).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.layers.mlp import Mlp, Xielu
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, mlp_without_gate, pre_norm_config
from jaxpaged.models.rope_config import with_rope
from jaxpaged.params.spec import Spec

APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""What Apertus's config.json means where it says nothing of positions."""
APERTUS_NORMS = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}


def arcee_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """AFM's config.json. `attention_bias` is on all four projections."""
    fields = HfFields(hf)
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        norm_eps=1e-5,
        activations=("relu2",),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def apertus_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """Apertus's config.json. CheckpointError for what published models do without: other norms, biases in blocks."""
    fields = HfFields({"rope_theta": 12_000_000.0, **with_rope(hf, APERTUS_ROPE)})
    fields.expect({"post_norm": False, "qk_norm": True, "mlp_bias": False}, of="Apertus")
    has_bias = fields.flag("attention_bias", False)
    return pre_norm_config(
        fields,
        [None] * fields.count("num_hidden_layers"),
        norm_eps=1e-5,
        activations=("xielu",),
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


def arcee_feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp:
    return mlp_without_gate(config, f"{name}.mlp")


def apertus_feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp:
    """Specs of a block whose activation has numbers of its own."""
    alpha_p, alpha_n = (
        Spec("", "1", f"{name}.mlp.act_fn.{alpha}", dtype="float32") for alpha in ("alpha_p", "alpha_n")
    )
    return mlp_without_gate(config, f"{name}.mlp", Xielu(alpha_p, alpha_n))


ARCEE = replace(
    llama.LLAMA,
    architectures=("ArceeForCausalLM",),
    config_from_hf=arcee_config_from_hf,
    param_specs=partial(decoder_specs, feed_forward=arcee_feed_forward),
)
APERTUS = replace(
    llama.LLAMA,
    architectures=("ApertusForCausalLM",),
    config_from_hf=apertus_config_from_hf,
    param_specs=partial(decoder_specs, qk_norm=True, norms=APERTUS_NORMS, feed_forward=apertus_feed_forward),
)
