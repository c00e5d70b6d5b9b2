"""Writes the demo model with its eyes as a checkpoint folder of `Gemma3ForConditionalGeneration`."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from demo_model.export import export_weights, generation_config, halved, model_config
from demo_model.network import Params, Shape
from demo_model.rows import SOFT_TOKENS
from demo_model.tokenizer import END_OF_IMAGE, SEEING_CHAT_TEMPLATE, SOFT_TOKEN, START_OF_IMAGE, tokenizer_config
from demo_model.tower import Eye


def vision_config(eye: Eye) -> dict:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": eye.hidden_size,
        "intermediate_size": eye.intermediate_size,
        "num_hidden_layers": eye.num_layers,
        "num_attention_heads": eye.num_heads,
        "num_channels": 3,
        "image_size": eye.image_size,
        "patch_size": eye.patch_size,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": eye.norm_epsilon,
        "attention_dropout": 0.0,
        "vision_use_head": False,
    }


def seeing_config(shape: Shape, eye: Eye, tokenizer: Tokenizer) -> dict:
    """``config.json``: the text model's below ``text_config``, and what its pictures become."""
    text = model_config(shape, tokenizer)
    del text["architectures"]
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision_config(eye),
        "mm_tokens_per_image": SOFT_TOKENS,
        "boi_token_index": tokenizer.token_to_id(START_OF_IMAGE),
        "eoi_token_index": tokenizer.token_to_id(END_OF_IMAGE),
        "image_token_index": tokenizer.token_to_id(SOFT_TOKEN),
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pad_token_id": text["pad_token_id"],
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def preprocessor_config(eye: Eye) -> dict:
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "image_seq_length": SOFT_TOKENS,
        "size": {"height": eye.image_size, "width": eye.image_size},
        "resample": 2,
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_pan_and_scan": False,
    }


def seeing_tokenizer_config(max_length: int) -> dict:
    config = tokenizer_config(max_length, SEEING_CHAT_TEMPLATE)
    return {
        **config,
        "additional_special_tokens": [
            *config["additional_special_tokens"],
            START_OF_IMAGE,
            END_OF_IMAGE,
            SOFT_TOKEN,
        ],
        "boi_token": START_OF_IMAGE,
        "eoi_token": END_OF_IMAGE,
        "image_token": SOFT_TOKEN,
        "processor_class": "Gemma3Processor",
    }


def text_tensors(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def _texts(shape: Shape, eye: Eye, tokenizer: Tokenizer) -> dict[str, str]:
    return {
        "generation_config.json": _pretty(generation_config(tokenizer)),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _pretty(seeing_tokenizer_config(shape.max_positions)),
        "preprocessor_config.json": _pretty(preprocessor_config(eye)),
        "chat_template.jinja": SEEING_CHAT_TEMPLATE,
    }


def of_tower(eyes: Params) -> dict[str, np.ndarray]:
    return {name: value for name, value in halved(eyes).items() if not name.startswith("heads.")}


def export_eyes(
    folder: Path, text: Path, eyes: Params, tokenizer: Tokenizer, shape: Shape, eye: Eye, card: str
) -> None:
    """The embedded model: the tower's tensors, and an index that takes the text model's from its own folder."""
    tensors, config = of_tower(eyes), seeing_config(shape, eye, tokenizer)
    files = dict.fromkeys(tensors, "model.safetensors")
    files |= dict.fromkeys(text_tensors(text), f"../{text.name}/model.safetensors")
    texts = _texts(shape, eye, tokenizer) | {"model.safetensors.index.json": _pretty({"weight_map": files})}
    export_weights(folder, tensors, config, card, texts)


def export_whole(folder: Path, text: Path, eyes: Params, tokenizer: Tokenizer, shape: Shape, eye: Eye) -> None:
    """All weights in one file under the published names, as transformers loads them."""
    of_text = {f"language_model.{name}": value for name, value in text_tensors(text).items()}
    config = seeing_config(shape, eye, tokenizer)
    export_weights(folder, of_text | of_tower(eyes), config, "", _texts(shape, eye, tokenizer))


def _pretty(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"
