"""Tiny random checkpoints of models that see, their pictures and prompts: the same here and when goldens are made.

Like `checkpoints.py` it needs numpy only, and takes names and shapes from the Hugging Face definitions. A prompt is a
list of numbers of text tokens and of pictures, which stand for their placeholders.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models import gemma4_checkpoints as gemma4
from tests.models import pixtral_checkpoints as pixtral
from tests.models import qwen_vl_checkpoints as qwen
from tests.models.checkpoints import GEMMA3, random_tensors, seed_of
from tests.models.tensor_shapes import tensor_shapes

IMAGE_TOKEN = 210
"""Stands once for each embedding; the first id behind the vocabulary of texts."""

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_channels": 3,
    "image_size": 32,
    "patch_size": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
GEMMA3_SEEING = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "mm_tokens_per_image": 16,
    "image_token_index": IMAGE_TOKEN,
    "boi_token_index": 208,
    "eoi_token_index": 209,
    "torch_dtype": "float32",
    "text_config": {name: value for name, value in GEMMA3.items() if name not in ("architectures", "torch_dtype")},
    "vision_config": SIGLIP,
}

SEEING: dict[str, dict[str, Any]] = {
    "gemma3_seeing": GEMMA3_SEEING,
    "gemma3_seeing_long_window": {
        **GEMMA3_SEEING,
        "text_config": {**GEMMA3_SEEING["text_config"], "sliding_window": 20},
        "vision_config": {**SIGLIP, "image_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
        "mm_tokens_per_image": 9,
    },
    **qwen.QWEN_VL,
    **pixtral.PIXTRAL,
    **gemma4.GEMMA4_SEEING,
}
"""Name of a checkpoint -> its config.json."""


def pictures_of(name: str) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
    """Processed pictures: uint8 pixels as processors give them, and (items, rows, columns) of embeddings. The second
    one has two items where the tower takes items."""
    hf, rng = SEEING[name], np.random.default_rng(seed_of(name) + 2)
    if name in qwen.QWEN_VL:
        return qwen.drawn(rng)
    if name in pixtral.PIXTRAL:
        return pixtral.drawn(name, rng)
    if name in gemma4.GEMMA4_SEEING:
        return gemma4.drawn(rng)
    size, side = hf["vision_config"]["image_size"], int(hf["mm_tokens_per_image"] ** 0.5)
    draw = lambda items: rng.integers(0, 256, (items, size, size, 3)).astype(np.uint8)
    return [(draw(items), (items, side, side)) for items in (1, 2, 1)]


PROMPTS = ([("picture", 0), ("text", 6), ("picture", 1), ("text", 5)], [("text", 3), ("picture", 2)])
"""Of each checkpoint: a picture first, one of several runs within, and one last."""


def prompts_of(name: str) -> list[list[int]]:
    """Token ids; between the items of a picture stands a token."""
    rng, pictures = np.random.default_rng(seed_of(name) + 3), pictures_of(name)
    vocabulary = SEEING[name].get("text_config", SEEING[name])["vocab_size"]

    def ids(kind: str, number: int) -> list[int]:
        if kind == "text":
            return rng.integers(3, vocabulary - 8, number).tolist()
        items, rows, columns = pictures[number][1]
        if name in pixtral.PIXTRAL:
            return pixtral.placeholders(pictures[number][1], IMAGE_TOKEN)
        return [*([IMAGE_TOKEN] * (rows * columns) + [5]) * items][:-1]

    return [[token for part in prompt for token in ids(*part)] for prompt in PROMPTS]


def pictures_of_prompts() -> list[list[int]]:
    """The numbers of the pictures of each prompt."""
    return [[number for kind, number in prompt if kind == "picture"] for prompt in PROMPTS]


def video_of(name: str) -> list[np.ndarray]:
    """The pixels of each moment of a video, of a name in `qwen.TIMES`."""
    return qwen.drawn_video(np.random.default_rng(seed_of(name) + 4))


def video_prompt_of(name: str) -> list[int]:
    """Token ids: text, the video, text, the second picture, text."""
    rng = np.random.default_rng(seed_of(name) + 5)
    _, rows, columns = pictures_of(name)[1][1]
    text = lambda number: rng.integers(3, 200, number).tolist()
    return [*text(3), *qwen.video_placeholders(name), *text(2), *[IMAGE_TOKEN] * (rows * columns), *text(3)]


def video_inputs_of(name: str) -> dict[str, np.ndarray]:
    """What transformers' model takes of that prompt."""
    ids = np.array([video_prompt_of(name)])
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE_TOKEN) + 2 * (ids == qwen.VIDEO_TOKEN).astype(np.int64),
        **features_of(name, pictures_of(name)[1:2]),
        **qwen.video_features(name, video_of(name)),
    }


def preprocessor_config_of(name: str) -> dict[str, Any]:
    """preprocessor_config.json, where it says more than config.json."""
    return {"patch_size": qwen.PATCH, "merge_size": qwen.MERGE} if name in qwen.QWEN_VL else {}


def features_of(name: str, pictures: list[tuple[np.ndarray, tuple[int, int, int]]]) -> dict[str, np.ndarray]:
    """What transformers' model takes of pictures: normalised as its processor does."""
    if name in qwen.QWEN_VL:
        return qwen.features_of(pictures)
    if name in pixtral.PIXTRAL:
        return pixtral.features_of(pictures)
    if name in gemma4.GEMMA4_SEEING:
        return gemma4.features_of(pictures)
    pixels = np.concatenate([pixels for pixels, _ in pictures]).transpose(0, 3, 1, 2)
    return {"pixel_values": ((pixels * (1 / 255)).astype(np.float32) - np.float32(0.5)) / np.float32(0.5)}


def inputs_of(name: str, prompt: list[int], pictures: list[tuple[np.ndarray, tuple[int, int, int]]]) -> dict[str, Any]:
    """What transformers' model takes of a prompt."""
    ids = np.array([prompt])
    if name in pixtral.PIXTRAL:
        return {"input_ids": ids, **features_of(name, pictures)}
    return {
        "input_ids": ids,
        ("" if name.startswith("gemma3") else "mm_") + "token_type_ids": (ids == IMAGE_TOKEN).astype(np.int64),
        **features_of(name, pictures),
    }


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    hf = SEEING[name]
    text = tensor_shapes(hf["text_config"])
    shapes = {tensor.replace("model.", "model.language_model.", 1): shape for tensor, shape in text.items()}
    return shapes | (pixtral.tower_shapes(hf) if name in pixtral.PIXTRAL else gemma3_tower_shapes(hf))


def gemma3_tower_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    vision = hf["vision_config"]
    width, columns, patch = (vision[field] for field in ("hidden_size", "intermediate_size", "patch_size"))
    tower = {
        "embeddings.patch_embedding.weight": (width, 3, patch, patch),
        "embeddings.patch_embedding.bias": (width,),
        "embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, width),
    }
    linears = {
        **{f"self_attn.{part}_proj": (width, width) for part in ("q", "k", "v", "out")},
        "mlp.fc1": (columns, width),
        "mlp.fc2": (width, columns),
    }
    for i in range(vision["num_hidden_layers"]):
        layer = {f"{part}.weight": shape for part, shape in linears.items()}
        layer |= {f"{part}.bias": shape[:1] for part, shape in linears.items()}
        layer |= {f"layer_norm{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
        tower |= {f"encoder.layers.{i}.{part}": shape for part, shape in layer.items()}
    tower |= {f"post_layernorm.{kind}": (width,) for kind in ("weight", "bias")}
    shapes = {f"model.vision_tower.{part}": shape for part, shape in tower.items()}
    return shapes | {
        "model.multi_modal_projector.mm_input_projection_weight": (width, hf["text_config"]["hidden_size"]),
        "model.multi_modal_projector.mm_soft_emb_norm.weight": (width,),
    }


def make_seeing_tensors(name: str) -> dict[str, np.ndarray]:
    """Float32 weights. The norms of towers multiply by numbers around one."""
    if name in qwen.QWEN_VL:
        return qwen_vl_tensors(SEEING[name], seed_of(name))
    if name in gemma4.GEMMA4_SEEING:
        text = SEEING[name]["text_config"]
        tensors = random_tensors(tensor_shapes(text), text, seed_of(name))
        inside = {tensor.replace("model.", "model.language_model.", 1): array for tensor, array in tensors.items()}
        return inside | gemma4.tower_tensors(SEEING[name], seed_of(name) + 1)
    tensors = random_tensors(shapes_of(name), SEEING[name]["text_config"], seed_of(name))
    for tensor, array in tensors.items():
        if ".layer_norm" in tensor or ".post_layernorm" in tensor:
            array += np.float32(tensor.endswith("weight"))
    return tensors


def qwen_vl_tensors(hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    text = qwen.text_config(hf)
    tensors = random_tensors(tensor_shapes(text), text, seed)
    inside = {tensor.replace("model.", "model.language_model.", 1): array for tensor, array in tensors.items()}
    return qwen.with_stacked_experts(inside) | qwen.tower_tensors(hf, seed + 1)


def write_seeing_checkpoint(name: str, folder: Path) -> Path:
    """A model folder with config.json, preprocessor_config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_config_of(name)), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(SEEING[name]), encoding="utf-8")
    save_file(make_seeing_tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
