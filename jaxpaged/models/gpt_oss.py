"""GPT-OSS: layers of experts with biases everywhere, every other with a window, and a sink in every head's softmax.

Published checkpoints keep the experts in MXFP4, in which they stay on devices with a kernel for it; elsewhere they
become weights of the model's type, or of 8 bits, when they are loaded. Source: arXiv 2508.10925.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.experts import Experts, RouterConfig
from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import ClampedSwiglu
from jaxpaged.models import llama
from jaxpaged.models.config import DecoderConfig, ExpertsConfig, HfFields, layer_windows
from jaxpaged.models.decoder import decoder_specs, pre_norm_config
from jaxpaged.models.expert_specs import check_experts
from jaxpaged.models.rope_config import with_rope
from jaxpaged.params.formats.float4 import MX_GROUP as GROUP
from jaxpaged.params.spec import Spec

MXFP4 = "mxfp4"
PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
DEFAULTS = {
    "head_dim": 64,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "dtype": "bfloat16",
}
"""What config.json may leave out. The published ones say nothing of the type, and have weights in bfloat16."""


def config_from_hf(hf: dict[str, Any]) -> DecoderConfig:
    """GPT-OSS's config.json. Layers with a window come first. Experts are as wide as `intermediate_size` says."""
    encoding = encoding_of(hf)
    defaults = {name: value for name, value in DEFAULTS.items() if name != "dtype" or "torch_dtype" not in hf}
    fields = HfFields({**defaults, **with_rope(hf, PUBLISHED_ROPE)})
    fields.read.add("initial_context_length")  # the rope's own original length, once more
    experts = ExpertsConfig(
        num_experts=fields.count("num_local_experts", 128),
        width=fields.count("intermediate_size"),
        router=RouterConfig(
            fields.count("num_experts_per_tok", fields.count("experts_per_token", 4)),
            is_normalised=True,  # the chosen experts' weights are a softmax of theirs alone, which is the same
        ),
        layers=tuple(range(fields.count("num_hidden_layers"))),
        encoding=encoding,
    )
    activation = ClampedSwiglu(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0))
    window = fields.count_or_none("sliding_window", 128)
    windows = layer_windows(fields, window, sliding=lambda i: i % 2 == 0)
    has_bias = fields.flag("attention_bias", True)
    config = pre_norm_config(
        fields, windows, norm_eps=1e-5, qkv_bias=has_bias, o_bias=has_bias, experts=check_experts(experts)
    )
    if encoding and (config.hidden_size % GROUP or experts.width % GROUP):
        raise CheckpointError(
            f"config.json: hidden_size {config.hidden_size} and intermediate_size {experts.width} must be multiples of "
            f"{GROUP} for weights in {MXFP4}. Is this the model's own config.json?"
        )
    return replace(config, activation=activation)


def encoding_of(hf: dict[str, Any]) -> str | None:
    """How the weights of experts are packed; other quantisations are refused with the fields that all models have."""
    quantization = hf.get("quantization_config")
    is_packed = isinstance(quantization, dict) and quantization.get("quant_method") == MXFP4
    return MXFP4 if is_packed else None


def feed_forward(config: DecoderConfig, name: str, layer: int) -> Experts:
    """Specs of a block. Gate and up take turns in one tensor."""
    assert config.experts is not None
    name = f"{name}.mlp"

    def gate_or_up(part: int) -> Linear:
        of_both: dict[str, Any] = {"fused": ("Q", "Q"), "part": part, "fused_axis": 1, "alternating": True}
        return Linear(
            Spec("eQD", "E Q D", f"{name}.experts.gate_up_proj", **of_both, transposed=True),
            Spec("eQ", "E Q", f"{name}.experts.gate_up_proj_bias", dtype="float32", **of_both),
        )

    return Experts(
        router=Linear(
            Spec("ED", "E D", f"{name}.router.weight", dtype="float32"),
            Spec("E", "E", f"{name}.router.bias", dtype="float32"),
        ),
        gate_proj=gate_or_up(0),
        up_proj=gate_or_up(1),
        down_proj=Linear(
            Spec("eDQ", "E D Q", f"{name}.experts.down_proj", transposed=True),
            Spec("eD", "E D", f"{name}.experts.down_proj_bias", dtype="float32"),
        ),
    )


GPT_OSS = replace(
    llama.LLAMA,
    architectures=("GptOssForCausalLM",),
    config_from_hf=config_from_hf,
    param_specs=partial(decoder_specs, sinks=True, feed_forward=feed_forward),
)
