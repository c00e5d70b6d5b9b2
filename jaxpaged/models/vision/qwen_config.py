"""What a tower of Qwen's VL models is, in numbers, and how config.json says it."""

from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.layers.mlp import ACTIVATIONS
from jaxpaged.models.config import HfFields, short
from jaxpaged.models.vision.interface import VisionConfig
from jaxpaged.models.vision.parts import vision_fields


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig(VisionConfig):
    """`merge`: the side of an embedding in patches. `window`: the side of a window in embeddings, None where patches
    see their whole picture in all layers; else in `full_layers`. `num_positions`: rows of the table of positions, 0
    where there is none. `deep_layers`: layers behind which the further levels are taken. `rope_theta`: the base of
    rotations."""

    merge: int
    rope_theta: float
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    deep_layers: tuple[int, ...] = ()

    @property
    def longest_window(self) -> int | None:
        """Patches of a window."""
        return None if self.window is None else (self.window * self.merge) ** 2

    def sees_all(self, layer: int) -> bool:
        """Whether a layer's patches see their whole picture."""
        return self.window is None or layer in self.full_layers

    def dim_sizes(self) -> dict[str, int]:
        sizes = super().dim_sizes()
        return {**sizes, "u": sizes["m"], "j": self.frames, "g": self.num_positions}


def qwen2_vl(hf: dict[str, Any]) -> QwenVisionConfig | None:
    """Of Qwen2-VL's config.json; None where it has no `vision_config`."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    width = fields.count("embed_dim", 1280)
    columns = int(width * fields.number("mlp_ratio", 4.0))
    config = tower(fields, hf, "qwen2_vl", width, columns, fields.count("hidden_size", 3584), "quick_gelu")
    fields.refuse_unread()
    return config


def qwen2_5_vl(hf: dict[str, Any]) -> QwenVisionConfig | None:
    """Of Qwen2.5-VL's."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    columns = fields.count("intermediate_size", 3420)
    out_width, window = fields.count("out_hidden_size", 3584), fields.count("window_size", 112)
    config = tower(fields, hf, "qwen2_5_vl", fields.count("hidden_size", 3584), columns, out_width, "silu")
    side = window // config.patch // config.merge
    if not side:
        raise CheckpointError(
            f"config.json: window_size of vision_config is {window}, less than the {config.patch * config.merge} "
            "pixels of an embedding. Check it."
        )
    full = layers(fields, "fullatt_block_indexes", [7, 15, 23, 31], config.num_layers)
    fields.refuse_unread()
    return replace(config, window=side, full_layers=full)


def qwen3_vl(hf: dict[str, Any]) -> QwenVisionConfig | None:
    """Of Qwen3-VL's, and of models with the same tower."""
    fields = vision_fields(hf)
    if fields is None:
        return None
    columns, out_width = fields.count("intermediate_size", 4304), fields.count("out_hidden_size", 3584)
    width = fields.count("hidden_size", 1152)
    config = tower(fields, hf, "qwen3_vl", width, columns, out_width, "gelu_pytorch_tanh", depth=27, patch=16)
    num_positions = fields.count("num_position_embeddings", 2304)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise CheckpointError(
            f"config.json: num_position_embeddings of vision_config is {num_positions}, not the square of a whole "
            "number. Check it."
        )
    deep = layers(fields, "deepstack_visual_indexes", [8, 16, 24], config.num_layers)
    fields.refuse_unread()
    return replace(config, num_positions=num_positions, deep_layers=deep, num_levels=len(deep))


OF_VIDEOS = ("tokens_per_second", "spatial_patch_size")
"""Fields of videos, and of nothing."""


def tower(
    fields: HfFields,
    hf: dict[str, Any],
    family: str,
    width: int,
    columns: int,
    out_width: int,
    activation: str,
    depth: int = 32,
    patch: int = 14,
) -> QwenVisionConfig:
    """What all of them say alike; the last three are defaults of what config.json says of them."""
    channels, heads = fields.count("in_channels", fields.count("in_chans", 3)), fields.count("num_heads", 16)
    if channels != 3:
        raise CheckpointError(f"config.json: in_channels of vision_config is {channels}; it must be 3.")
    if width % heads or width // heads % 4:
        raise CheckpointError(
            f"config.json: vision_config has {heads} heads for a width of {width}; a head must have a multiple of 4 "
            "numbers, half of which are rotated by row and half by column."
        )
    of_text = hf["text_config"] if isinstance(hf.get("text_config"), dict) else hf
    decoder_width = HfFields(of_text).count("hidden_size")
    if out_width != decoder_width:
        raise CheckpointError(
            f"config.json: the tower gives embeddings of {out_width} numbers, but hidden_size of the language model is "
            f"{decoder_width}. Check that config.json belongs to these weights."
        )
    merge = fields.count("spatial_merge_size", 2)
    ropes = fields.value("rope_parameters", {})
    fields.read.update(OF_VIDEOS)
    return QwenVisionConfig(
        family=family,
        width=width,
        num_layers=fields.count("depth", depth),
        num_heads=heads,
        head_dim=width // heads,
        columns=columns,
        patch=fields.count("patch_size", patch),
        out_width=out_width,
        norm_eps=1e-6,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), activation),
        patches_per_embed=merge**2,
        merge=merge,
        frames=fields.count("temporal_patch_size", 2),
        rope_theta=HfFields(ropes if isinstance(ropes, dict) else {}).number("rope_theta", 10_000.0),
    )


def layers(fields: HfFields, name: str, default: list[int], num_layers: int) -> tuple[int, ...]:
    """Numbers of layers."""
    found = fields.value(name, default)
    if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < num_layers for i in found):
        raise CheckpointError(
            f"config.json: {name} of vision_config is {short(found)}; it must be a list of layers, of which there are "
            f"{num_layers}."
        )
    return tuple(found)
