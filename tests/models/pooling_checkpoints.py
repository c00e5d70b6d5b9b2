"""Checkpoints of models that pool, made from the tiny ones that generate: embedding models and classifiers."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers

from tests.models.checkpoints import CONFIGS, make_tensors, prompt_of, seed_of


def labels(*names):
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


CHECKPOINTS = {
    "llama_embed": ("llama", {"architectures": ["LlamaModel"], "is_matryoshka": True}),
    "qwen3_embed": ("qwen3", {"architectures": ["Qwen3Model"]}),
    "gemma3_embed": ("gemma3", {"architectures": ["Gemma3TextModel"]}),
    "qwen2_classify": ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"], **labels("no", "yes", "so so")}),
    "llama_score": ("llama", {"architectures": ["LlamaForSequenceClassification"], **labels("fits")}),
}
"""Name -> the checkpoint with the same layers, and what is different in its config.json."""


def prompts(name):
    """Prompts of one, of some and of many chunks, in tokens."""
    ids = prompt_of(CHECKPOINTS[name][0])
    return [ids, ids[:5], ids[7:24]]


def write(name: str, folder: Path) -> Path:
    """The complete model folder of one checkpoint, with a tokenizer.

    A classifier has `score.weight`. A model without a head has names without "model.", as such checkpoints do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base, changes = CHECKPOINTS[name]
    config = {**CONFIGS[base], **changes}
    tensors = {key: value for key, value in make_tensors(base).items() if key != "lm_head.weight"}
    if "id2label" in changes:
        shape, rng = (len(changes["id2label"]), config["hidden_size"]), np.random.default_rng(seed_of(base) + 2)
        tensors["score.weight"] = rng.standard_normal(shape, dtype=np.float32) / 4
    else:
        tensors = {key.removeprefix("model."): value for key, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The word "w7" is token id 7; nothing is added to a text."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
