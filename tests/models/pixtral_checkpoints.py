"""The part of `seeing_checkpoints.py` for Mistral 3 and Pixtral's tower: descriptions, pictures, shapes of tensors."""

import math
from typing import Any

import numpy as np

from tests.models.checkpoints import MISTRAL

Picture = tuple[np.ndarray, tuple[int, int, int]]

GRIDS = ((1, 2, 3), (1, 3, 2), (1, 1, 4))
"""Of three pictures: items, rows and columns of embeddings."""
PATCH, MERGE = 4, 2
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BREAK = 6
"""The token between two rows."""

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_channels": 3,
    "image_size": 64,
    "patch_size": PATCH,
    "hidden_act": "gelu",
    "rope_theta": 100.0,
}
MISTRAL3 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 210,
    "spatial_merge_size": MERGE,
    "vision_feature_layer": -1,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": False,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "text_config": {
        **{name: value for name, value in MISTRAL.items() if name not in ("architectures", "torch_dtype")},
        "sliding_window": 11,
        "vocab_size": 223,
    },
    "vision_config": VISION,
}
LLAVA = "llava_pixtral"
"""The name of the checkpoint in whose embeddings no patches are merged."""
PIXTRAL: dict[str, dict[str, Any]] = {
    "mistral3": MISTRAL3,
    "mistral3_bias": {
        **MISTRAL3,
        "multimodal_projector_bias": True,
        "projector_hidden_act": "silu",
        "text_config": {**MISTRAL3["text_config"], "sliding_window": None},
        "vision_config": {
            **{name: value for name, value in VISION.items() if name != "rope_theta"},
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
        },
    },
    LLAVA: {
        **{name: value for name, value in MISTRAL3.items() if name not in ("spatial_merge_size",)},
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_seq_length": 1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": True,
        "text_config": {**MISTRAL3["text_config"], "sliding_window": None, "is_composition": True},
        "vision_config": {**VISION, "is_composition": True, "tie_word_embeddings": False},
    },
}


def drawn(name: str, rng: np.random.Generator) -> list[Picture]:
    """Patches as the processor gives them."""
    merge = 1 if name == LLAVA else MERGE
    shapes = [(rows * columns * merge**2, 3 * PATCH**2) for _, rows, columns in GRIDS]
    return [(rng.integers(0, 256, shape).astype(np.uint8), grid) for shape, grid in zip(shapes, GRIDS, strict=True)]


def placeholders(grid: tuple[int, int, int], token: int) -> list[int]:
    """Each row of a picture ends with a break, the last one with the end, which is a token of the text here."""
    _, rows, columns = grid
    return [*([token] * columns + [BREAK]) * rows][:-1]


def features_of(pictures: list[Picture]) -> dict[str, np.ndarray]:
    """What transformers' model takes: pictures as they are, normalised, beside each other in an array of zeros."""
    (patches, (_, rows, columns)) = pictures[0]
    merge = math.isqrt(len(patches) // (rows * columns))
    side = PATCH * merge
    sizes = np.array([(rows * side, columns * side) for _, (_, rows, columns) in pictures])
    pixels = np.zeros((len(pictures), 3, *sizes.max(axis=0)), np.float32)
    for number, (patches, (_, rows, columns)) in enumerate(pictures):
        cells = patches.reshape(rows, columns, merge, merge, 3, PATCH, PATCH)
        whole = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *sizes[number])
        values = (whole * (1 / 255)).astype(np.float32)
        normal = (values - np.array(MEAN, np.float32)[:, None, None]) / np.array(STD, np.float32)[:, None, None]
        pixels[number, :, : sizes[number, 0], : sizes[number, 1]] = normal
    return {"pixel_values": pixels, "image_sizes": sizes}


def tower_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of tower and projector."""
    vision, out = hf["vision_config"], hf["text_config"]["hidden_size"]
    width, columns = vision["hidden_size"], vision["intermediate_size"]
    layer = {
        **{f"attention.{part}_proj.weight": (width, width) for part in "qkvo"},
        "feed_forward.gate_proj.weight": (columns, width),
        "feed_forward.up_proj.weight": (columns, width),
        "feed_forward.down_proj.weight": (width, columns),
        "attention_norm.weight": (width,),
        "ffn_norm.weight": (width,),
    }
    tower = {"patch_conv.weight": (width, 3, PATCH, PATCH), "ln_pre.weight": (width,)}
    for i in range(vision["num_hidden_layers"]):
        tower |= {f"transformer.layers.{i}.{name}": shape for name, shape in layer.items()}
    projector = {
        "norm.weight": (width,),
        "patch_merger.merging_layer.weight": (width, width * MERGE**2),
        "linear_1.weight": (out, width),
        "linear_2.weight": (out, out),
    }
    if hf["model_type"] == "llava":
        del projector["norm.weight"], projector["patch_merger.merging_layer.weight"]
    if hf["multimodal_projector_bias"]:
        projector |= {"linear_1.bias": (out,), "linear_2.bias": (out,)}
    return {
        **{f"model.vision_tower.{name}": shape for name, shape in tower.items()},
        **{f"model.multi_modal_projector.{name}": shape for name, shape in projector.items()},
    }
