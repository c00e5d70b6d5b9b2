"""ERNIE 4.5: Llama's layers, in which neighbours of a head are rotated together, and blocks of experts.

The router is a softmax with a correction; shared experts are as wide as several. What predicts further tokens is not
loaded. Source: Baidu's technical report of ERNIE 4.5 and config.json.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.experts import Experts, RouterConfig
from jaxpaged.layers.mlp import Mlp
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.expert_specs import check_experts, feed_forward_specs
from jaxpaged.params.spec import Spec

DEFAULTS = {"rope_theta": 500_000.0, "tie_word_embeddings": True}
"""Fields that config.json may leave out."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """The config.json of a dense model. `use_bias` is on all projections."""
    fields = own_fields({"head_dim": 128, **hf})
    has_bias = fields.flag("use_bias", False)
    windows = [None] * fields.count("num_hidden_layers")
    biases = {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": has_bias}
    return pre_norm_config(fields, windows, norm_eps=1e-5, interleaved_rope=True, **biases)


def moe_config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """The config.json of a model with experts."""
    fields = own_fields(hf)
    if fields.flag("use_bias", False):
        raise CheckpointError("config.json: use_bias is true; with experts, biases are not supported.")
    num_layers, width = fields.count("num_hidden_layers"), fields.count("moe_intermediate_size", 1536)
    first, step = fields.index("moe_layer_start_index", 1), fields.count("moe_layer_interval", 1)
    last = fields.value("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else fields.index("moe_layer_end_index", num_layers - 1)
    experts = ExpertsConfig(
        num_experts=fields.count("moe_num_experts", 64),
        width=width,
        router=RouterConfig(
            fields.count("moe_k", 6), is_normalised=True, least_sum=fields.number("moe_norm_min", 1e-12)
        ),
        layers=tuple(i for i in range(num_layers) if first <= i <= last and (i + 1) % step == 0),
        shared_width=width * fields.index("moe_num_shared_experts", 2),
    )
    return pre_norm_config(
        fields,
        [None] * num_layers,
        norm_eps=1e-5,
        interleaved_rope=True,
        num_mtp_layers=fields.index("num_nextn_predict_layers", 0),
        experts=check_experts(experts),
    )


def own_fields(hf: dict[str, Any]) -> HfFields:
    """The fields; CheckpointError for positions that are compressed, which published models do not do."""
    fields = HfFields({**DEFAULTS, **hf})
    if fields.number("compression_ratio", 1.0) != 1.0:
        raise CheckpointError("config.json: compression_ratio is not 1; such positions are not supported.")
    fields.read |= OF_TRAINING
    return fields


OF_TRAINING = {"use_flash_attention", "moe_capacity", "moe_gate", "moe_use_aux_free", "moe_multimodal_paired_experts"}
"""Fields that say how others compute the same, or how the model was trained."""


def moe_feed_forward(config: DecoderConfig, name: str, layer: int) -> Mlp | Experts:
    """Specs of a block. The checkpoint has a correction for every kind of token, of which text is the only one."""
    block = feed_forward_specs(config, name, layer, shared="shared_experts")
    if isinstance(block, Mlp):
        return block
    correction = Spec("E", "1 E", f"{name}.mlp.moe_statics.e_score_correction_bias", dtype="float32")
    return block.replace(correction=correction)


ERNIE4_5 = replace(llama.LLAMA, architectures=("Ernie4_5ForCausalLM",), config_from_hf=config_from_hf)
ERNIE4_5_MOE = replace(
    llama.LLAMA,
    architectures=("Ernie4_5_MoeForCausalLM",),
    config_from_hf=moe_config_from_hf,
    param_specs=partial(decoder_specs, feed_forward=moe_feed_forward),
)
