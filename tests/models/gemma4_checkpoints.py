"""The part of `seeing_checkpoints.py` for Gemma 4's tower: descriptions, pictures, tensors."""

from typing import Any

import numpy as np

from tests.models.checkpoints import GEMMA4, GEMMA4_MOE

Picture = tuple[np.ndarray, tuple[int, int, int]]

GRIDS = ((1, 2, 3), (1, 3, 2), (1, 1, 4))
"""Of three pictures: items, rows and columns of embeddings."""
PATCH, MERGE = 4, 3
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": MERGE,
    "patch_size": PATCH,
    "position_embedding_size": 1024,
    "use_clipped_linears": True,
    "standardize": False,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
WHOLE = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "image_token_id": 210,
    "boi_token_id": 208,
    "eoi_token_id": 209,
    "video_token_id": 207,
    "audio_token_id": 206,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "audio_config": None,
}


def text(hf: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in hf.items() if name not in ("architectures", "torch_dtype")} | changes


GEMMA4_SEEING: dict[str, dict[str, Any]] = {
    "gemma4_seeing": {**WHOLE, "text_config": text(GEMMA4, pad_token_id=5), "vision_config": VISION},
    "gemma4_seeing_both_ways": {
        **WHOLE,
        "text_config": text(GEMMA4_MOE, use_bidirectional_attention="vision", sliding_window=6),
        "vision_config": {**VISION, "use_clipped_linears": False, "standardize": True, "num_hidden_layers": 1},
    },
}
"""As the small models are: limited products, layers' own inputs, causal. And as the large ones are."""


def drawn(rng: np.random.Generator) -> list[Picture]:
    """Patches as the processor gives them."""
    shapes = [(rows * columns * MERGE**2, 3 * PATCH**2) for _, rows, columns in GRIDS]
    return [(rng.integers(0, 256, shape).astype(np.uint8), grid) for shape, grid in zip(shapes, GRIDS, strict=True)]


def features_of(pictures: list[Picture]) -> dict[str, np.ndarray]:
    """What transformers' model takes: patches row by row, each in the order row, column, channel, and their places."""
    most = max(len(patches) for patches, _ in pictures)
    pixels = np.zeros((len(pictures), most, 3 * PATCH**2), np.float32)
    places = np.full((len(pictures), most, 2), -1, np.int64)
    for number, (patches, (_, rows, columns)) in enumerate(pictures):
        cells = patches.reshape(rows, columns, MERGE, MERGE, 3, PATCH, PATCH)
        in_rows = cells.transpose(0, 2, 1, 3, 5, 6, 4).reshape(len(patches), -1)
        pixels[number, : len(patches)] = in_rows * (1 / 255)
        y, x = np.divmod(np.arange(len(patches)), columns * MERGE)
        places[number, : len(patches)] = np.stack([x, y], axis=-1)
    return {"pixel_values": pixels, "image_position_ids": places}


def tower_tensors(hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Float32 weights of tower and projection. Limits are where they cut a part of what they limit."""
    rng, vision = np.random.default_rng(seed), hf["vision_config"]
    width, columns, head_dim = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    weight = lambda *shape: draw(*shape) / np.float32(shape[-1] ** 0.5)
    norm = lambda size: 1 + 0.2 * draw(size)
    tower = {
        "patch_embedder.input_proj.weight": weight(width, 3 * PATCH**2),
        "patch_embedder.position_embedding_table": draw(2, vision["position_embedding_size"], width),
    }
    linears = {f"self_attn.{part}_proj": (width, width) for part in "qkvo"}
    linears |= {"mlp.gate_proj": (columns, width), "mlp.up_proj": (columns, width), "mlp.down_proj": (width, columns)}
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i in range(vision["num_hidden_layers"]):
        for part, shape in linears.items():
            tower[f"encoder.layers.{i}.{part}.linear.weight"] = weight(*shape)
            if vision["use_clipped_linears"]:
                for limit, value in {
                    "input_min": -1.1,
                    "input_max": 0.9,
                    "output_min": -0.7,
                    "output_max": 0.8,
                }.items():
                    tower[f"encoder.layers.{i}.{part}.{limit}"] = np.array(value, np.float32)
        tower |= {f"encoder.layers.{i}.{part}.weight": norm(width) for part in norms}
        tower |= {f"encoder.layers.{i}.self_attn.{part}_norm.weight": norm(head_dim) for part in "qk"}
    if vision["standardize"]:
        tower |= {"std_bias": draw(width), "std_scale": norm(width)}
    projection = {"model.embed_vision.embedding_projection.weight": weight(hf["text_config"]["hidden_size"], width)}
    return {f"model.vision_tower.{name}": tensor for name, tensor in tower.items()} | projection
