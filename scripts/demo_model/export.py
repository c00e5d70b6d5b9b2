"""Writes the trained model as a Hugging Face checkpoint folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from demo_model.network import Params, Shape
from demo_model.tokenizer import (
    BOS,
    CHAT_TEMPLATE,
    END_OF_TURN,
    EOS,
    PAD,
    tokenizer_config,
)


def _attention_config(shape: Shape) -> dict:
    """Positions and windows, with the keys of both old and new transformers."""
    kinds = ["sliding_attention", "full_attention"]
    rope_thetas = dict(zip(kinds, [shape.rope_local_theta, shape.rope_theta], strict=True))
    return {
        "layer_types": [kinds[shape.is_full_attention(i)] for i in range(shape.num_layers)],
        "sliding_window": shape.sliding_window,
        "sliding_window_pattern": shape.full_attention_every,
        "rope_theta": shape.rope_theta,
        "rope_local_base_freq": shape.rope_local_theta,
        "rope_scaling": None,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in rope_thetas.items()},
        "query_pre_attn_scalar": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
    }


def model_config(shape: Shape, tokenizer: Tokenizer) -> dict:
    """``config.json``."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_epsilon,
        **_attention_config(shape),
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "initializer_range": 0.02,
        "pad_token_id": tokenizer.token_to_id(PAD),
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "torch_dtype": "bfloat16",
    }


def generation_config(tokenizer: Tokenizer) -> dict:
    return {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END_OF_TURN)],
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": False,
        "temperature": 0.0,  # engines that read defaults from here do not look at do_sample
    }


def export(folder: Path, params: Params, shape: Shape, tokenizer: Tokenizer, card: str) -> None:
    """A model folder with its tokenizer."""
    texts = {
        "generation_config.json": _pretty(generation_config(tokenizer)),
        "tokenizer_config.json": _pretty(tokenizer_config(shape.max_positions)),
        "chat_template.jinja": CHAT_TEMPLATE,
        "tokenizer.json": tokenizer.to_str(),
    }
    export_weights(folder, halved(params), model_config(shape, tokenizer), card, texts)


def export_weights(
    folder: Path, tensors: Mapping[str, np.ndarray], config: dict, card: str, texts: Mapping[str, str] | None = None
) -> None:
    """Description, card and weights of a model, and other files of text.

    Every file is written beside its target and renamed into place: readers then see old or new files, never half of
    one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"config.json": _pretty(config), "README.md": card}
    for name, text in {**own, **(texts or {})}.items():
        partial = folder / f".{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
    partial = folder / ".model.safetensors.partial"
    save_file(dict(tensors), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, folder / "model.safetensors")


def halved(params: Params) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, in bfloat16."""
    return {name: np.asarray(value.astype(jnp.bfloat16)) for name, value in params.items()}


def _pretty(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"
