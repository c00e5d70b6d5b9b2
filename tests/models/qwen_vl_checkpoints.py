"""The part of `seeing_checkpoints.py` for Qwen's VL models: descriptions, pictures, and shapes of their towers."""

from typing import Any

import numpy as np

from tests.models.checkpoints import QWEN2, QWEN3, QWEN3_MOE

Picture = tuple[np.ndarray, tuple[int, int, int]]

GRIDS = ((1, 3, 5), (1, 1, 2), (1, 4, 3))
"""Of three pictures: items, rows and columns of embeddings. Windows of 2 x 2 are cut at the sides."""
PATCH, MERGE = 4, 2

OF_TOKENS = {
    "image_token_id": 210,
    "video_token_id": 209,
    "vision_start_token_id": 207,
    "vision_end_token_id": 208,
    "torch_dtype": "float32",
}
COMMON = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
TOWER_2 = {**COMMON, "embed_dim": 32, "mlp_ratio": 2, "in_chans": 3, "hidden_act": "quick_gelu", "hidden_size": 64}
TOWER_2_5 = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 44,
    "out_hidden_size": 64,
    "in_chans": 3,
    "hidden_act": "silu",
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
TOWER_3 = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 44,
    "out_hidden_size": 48,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
NOT_OF_TEXT = ("architectures", "torch_dtype", "model_type", "rope_theta", "tie_word_embeddings")


def text_of(hf: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A description of a text model as the part of another one; as many ids as there are with a picture's."""
    return {**{name: value for name, value in hf.items() if name not in NOT_OF_TEXT}, "vocab_size": 211, **changes}


QWEN2_VL = {
    **text_of(QWEN2),
    **OF_TOKENS,
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "tie_word_embeddings": False,
    "vision_config": {**TOWER_2, "model_type": "qwen2_vl"},
}
QWEN2_5_VL = {
    **QWEN2_VL,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {**TOWER_2_5, "model_type": "qwen2_5_vl"},
}
QWEN3_VL = {
    **OF_TOKENS,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "text_config": text_of(
        QWEN3,
        model_type="qwen3_vl_text",
        rope_theta=500.0,
        num_hidden_layers=3,
        rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    ),
    "vision_config": {**TOWER_3, "model_type": "qwen3_vl"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

QWEN_VL: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN2_VL,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_5_vl_yarn": {
        **OF_TOKENS,
        "architectures": QWEN2_5_VL["architectures"],
        "model_type": "qwen2_5_vl",
        "text_config": text_of(
            QWEN2,
            model_type="qwen2_5_vl_text",
            rope_parameters={**YARN, "mrope_section": [1, 1, 2], "rope_theta": 500.0},
            tie_word_embeddings=True,
        ),
        "vision_config": {**TOWER_2_5, "model_type": "qwen2_5_vl", "fullatt_block_indexes": [0, 2]},
    },
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_yarn": {
        **QWEN3_VL,
        "tie_word_embeddings": True,
        "text_config": {**QWEN3_VL["text_config"], "rope_scaling": {**YARN, "mrope_section": [4, 2, 2]}},
        "vision_config": {**TOWER_3, "model_type": "qwen3_vl", "deepstack_visual_indexes": []},
    },
    "qwen3_vl_moe": {
        **QWEN3_VL,
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": {
            **text_of(QWEN3_MOE, model_type="qwen3_vl_moe_text", rope_theta=500.0),
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
            "moe_intermediate_size": 20,  # other shapes tell transformers how tensors lie
        },
        "vision_config": {**TOWER_3, "model_type": "qwen3_vl_moe"},
    },
}
"""Name of a checkpoint -> its config.json; flat ones as older models are published. Without levels the tower is that of
models that have no DeepStack."""

TEXT_KINDS = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}


def text_config(hf: dict[str, Any]) -> dict[str, Any]:
    """The description of the text model inside, as one by itself."""
    part = hf.get("text_config", hf)
    ties = bool(hf.get("tie_word_embeddings") or part.get("tie_word_embeddings"))
    return {**part, "model_type": TEXT_KINDS[hf["model_type"]], "tie_word_embeddings": ties}


def drawn(rng: np.random.Generator) -> list[Picture]:
    """uint8 [patches, 3 * side * side], and grids."""
    return [(rng.integers(0, 256, (np.prod(grid) * MERGE**2, 3 * PATCH**2)).astype(np.uint8), grid) for grid in GRIDS]


VIDEO_TOKEN = OF_TOKENS["video_token_id"]
VIDEO_GRID = (3, 2, 4)
"""Moments, rows and columns of a video of five frames."""
SECONDS = 0.75
"""Between moments."""
TIMES = {"qwen2_vl": (0, 1, 2), "qwen2_5_vl": (0, 1, 3), "qwen3_vl": (0, 0, 0)}
"""Positions in time of the moments of the checkpoints that have goldens with videos, counted from their beginning; of
Qwen2.5-VL rounded down, of two tokens a second. Qwen3-VL's stand alone, each behind its own time in words."""


def drawn_video(rng: np.random.Generator) -> list[np.ndarray]:
    """uint8 [patches, 3 * 2 * side * side] of each moment, channel by channel, then frame by frame. The last frame is
    there twice."""
    moments, rows, columns = VIDEO_GRID
    frames = rng.integers(0, 256, (2 * moments - 1, rows * columns * MERGE**2, 3, PATCH**2)).astype(np.uint8)
    return [
        np.stack([frames[2 * i], frames[min(2 * i + 1, len(frames) - 1)]], axis=2).reshape(-1, 6 * PATCH**2)
        for i in range(moments)
    ]


def video_placeholders(name: str) -> list[int]:
    """Token ids that stand for the video."""
    moments, rows, columns = VIDEO_GRID
    one = [VIDEO_TOKEN] * (rows * columns)
    if name != "qwen3_vl":
        return one * moments
    return [token for i in range(moments) for token in [20 + i, 30, OF_TOKENS["vision_start_token_id"], *one, 208]]


def video_features(name: str, moments: list[np.ndarray]) -> dict[str, np.ndarray]:
    """What transformers' model takes of a video."""
    pixels = np.concatenate(moments).reshape(-1, 3, 2, PATCH**2)
    numbers = ((pixels * (1 / 255)).astype(np.float32) - MEAN[:, None, None]) / STD[:, None, None]
    count, rows, columns = VIDEO_GRID
    seconds = {"second_per_grid_ts": np.array([SECONDS], np.float32)} if name == "qwen2_5_vl" else {}
    grid = np.array([(count, MERGE * rows, MERGE * columns)])
    return {"pixel_values_videos": numbers.reshape(len(pixels), -1), "video_grid_thw": grid, **seconds}


MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)


def features_of(pictures: list[Picture]) -> dict[str, np.ndarray]:
    """What transformers' model takes of pictures: each patch twice, as two frames, channel by channel."""
    pixels = np.concatenate([pixels for pixels, _ in pictures]).reshape(-1, 3, 1, PATCH**2)
    numbers = ((pixels * (1 / 255)).astype(np.float32) - MEAN[:, None, None]) / STD[:, None, None]
    return {
        "pixel_values": np.repeat(numbers, 2, axis=2).reshape(len(pixels), -1),
        "image_grid_thw": np.array([(items, MERGE * rows, MERGE * columns) for _, (items, rows, columns) in pictures]),
    }


def tower_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a tower."""
    vision, kind = hf["vision_config"], hf["model_type"].removesuffix("_moe")
    is_second = kind == "qwen2_vl"
    width = vision["embed_dim" if is_second else "hidden_size"]
    columns = width * vision["mlp_ratio"] if is_second else vision["intermediate_size"]
    out, joined = vision["hidden_size" if is_second else "out_hidden_size"], width * MERGE**2
    fields = ("weight",) if kind == "qwen2_5_vl" else ("weight", "bias")
    norm = lambda name, size: {f"{name}.{field}": (size,) for field in fields}
    linear = lambda name, rows, inputs: {f"{name}.weight": (rows, inputs), f"{name}.bias": (rows,)}
    names = {"qwen2_vl": ("fc1", "fc2"), "qwen3_vl": ("linear_fc1", "linear_fc2"), "qwen2_5_vl": ()}[kind]
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (width, 3, 2, PATCH, PATCH)}
    for i in range(vision["depth"]):
        layer = {**norm("norm1", width), **norm("norm2", width), **linear("attn.qkv", 3 * width, width)}
        layer |= linear("attn.proj", width, width)
        if names:
            layer |= linear(f"mlp.{names[0]}", columns, width) | linear(f"mlp.{names[1]}", width, columns)
        else:
            layer |= linear("mlp.gate_proj", columns, width) | linear("mlp.up_proj", columns, width)
            layer |= linear("mlp.down_proj", width, columns)
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in layer.items()}
    if kind != "qwen3_vl":
        merger = {**norm("ln_q", width), **linear("mlp.0", joined, joined), **linear("mlp.2", out, joined)}
        return shapes | {f"merger.{name}": shape for name, shape in merger.items()}
    products = {**linear("linear_fc1", joined, joined), **linear("linear_fc2", out, joined)}
    shapes |= {f"merger.{name}": shape for name, shape in {**norm("norm", width), **products}.items()}
    for i in range(len(vision["deepstack_visual_indexes"])):
        merger = {**norm("norm", joined), **products}
        shapes |= {f"deepstack_merger_list.{i}.{name}": shape for name, shape in merger.items()}
    return shapes | {
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (vision["num_position_embeddings"], width),
    }


def tower_tensors(hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Float32 weights. Queries and keys are large, so that a wrong window or position shows."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in tower_shapes(hf).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            noise = noise * np.float32(0.3) + np.float32("bias" not in name)
        elif name != "pos_embed.weight":
            noise = noise * np.float32((2 if "qkv" in name else 1) / np.prod(shape[1:]) ** 0.5)
        tensors[f"model.visual.{name}"] = noise.astype(np.float32)
    return tensors


def with_stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a text model with those of its experts as Qwen3-VL's files have them: one of all, inputs first."""
    stacked = {name: array for name, array in tensors.items() if ".experts." not in name}
    blocks = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for block in blocks:
        of_experts = lambda kind, block=block: [
            tensors[f"{block}.experts.{i}.{kind}_proj.weight"].T
            for i in range(sum(name.startswith(f"{block}.experts.") for name in tensors) // 3)
        ]
        gate_up = [np.concatenate(pair, axis=1) for pair in zip(of_experts("gate"), of_experts("up"), strict=True)]
        stacked[f"{block}.experts.gate_up_proj"] = np.stack(gate_up)
        stacked[f"{block}.experts.down_proj"] = np.stack(of_experts("down"))
    return stacked
