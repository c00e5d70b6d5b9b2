"""Qwen's towers as records: their parameters under the names of the checkpoints, and the functions of each family."""

from dataclasses import replace

from jaxpaged.layers.linear import Linear
from jaxpaged.layers.mlp import Mlp
from jaxpaged.layers.norm import LayerNorm, Norm
from jaxpaged.models.vision.interface import Vision
from jaxpaged.models.vision.parts import Block, Heads, linear_specs, placed
from jaxpaged.models.vision.qwen_config import QwenVisionConfig, qwen2_5_vl, qwen2_vl, qwen3_vl
from jaxpaged.models.vision.qwen_packing import pack, shapes
from jaxpaged.models.vision.qwen_tower import Layer, Merger, Tower, encode
from jaxpaged.models.vision.rope_offsets import rope_offsets
from jaxpaged.params.spec import Spec


def param_specs(config: QwenVisionConfig, num_shards: int) -> Tower:
    """`Vision.param_specs`."""
    is_third = config.family == "qwen3_vl"
    specs = Tower(
        patch_embed=linear_specs("dbjrs", "d b j r s", "visual.patch_embed.proj", has_bias=is_third),
        layers=[layer_specs(config, f"visual.blocks.{i}") for i in range(config.num_layers)],
        merger=merger_specs(config, "visual.merger", "d"),
        deep_mergers=[
            merger_specs(config, f"visual.deepstack_merger_list.{i}", "m") for i in range(len(config.deep_layers))
        ],
        pos_embed=Spec("gd", "g d", "visual.pos_embed.weight") if config.num_positions else None,
    )
    return placed(specs, config, num_shards)


def layer_specs(config: QwenVisionConfig, name: str) -> Layer:
    qkv = [
        Linear(
            Spec("nhd", "nh d", f"{name}.attn.qkv.weight", fused=THREE, part=part),
            Spec("nh", "nh", f"{name}.attn.qkv.bias", fused=THREE, part=part),
        )
        for part in range(3)
    ]
    return Layer(
        norm1=norm_specs(config, "d", f"{name}.norm1"),
        attn=Heads(*qkv, linear_specs("dnh", "d nh", f"{name}.attn.proj")),
        norm2=norm_specs(config, "d", f"{name}.norm2"),
        mlp=mlp_specs(config, f"{name}.mlp"),
    )


THREE = ("nh", "nh", "nh")
"""Queries, keys and values stand one after another."""


def norm_specs(config: QwenVisionConfig, letter: str, name: str) -> Norm | LayerNorm:
    weight = Spec(letter, letter, f"{name}.weight")
    return Norm(weight) if config.family == "qwen2_5_vl" else LayerNorm(weight, Spec(letter, letter, f"{name}.bias"))


def mlp_specs(config: QwenVisionConfig, name: str) -> Mlp | Block:
    if config.family == "qwen2_5_vl":
        inwards = [linear_specs("fd", "f d", f"{name}.{part}_proj") for part in ("gate", "up")]
        return Mlp(*inwards, linear_specs("df", "d f", f"{name}.down_proj"))
    prefix = "linear_" if config.family == "qwen3_vl" else ""
    return Block(linear_specs("fd", "f d", f"{name}.{prefix}fc1"), linear_specs("df", "d f", f"{name}.{prefix}fc2"))


def merger_specs(config: QwenVisionConfig, name: str, letter: str) -> Merger:
    """`letter` is that of the width of its norm."""
    norm, first, second = (
        ("norm", "linear_fc1", "linear_fc2") if config.family == "qwen3_vl" else ("ln_q", "mlp.0", "mlp.2")
    )
    return Merger(
        norm_specs(config, letter, f"{name}.{norm}"),
        Block(linear_specs("um", "u m", f"{name}.{first}"), linear_specs("Du", "D u", f"{name}.{second}")),
    )


QWEN2_VISION = Vision(
    config_from_hf=qwen2_vl,
    param_specs=param_specs,
    shapes=shapes,
    pack=pack,
    encode=encode,
    rope_offsets=rope_offsets,
)
QWEN2_5_VISION = replace(QWEN2_VISION, config_from_hf=qwen2_5_vl)
QWEN3_VISION = replace(QWEN2_VISION, config_from_hf=qwen3_vl)
