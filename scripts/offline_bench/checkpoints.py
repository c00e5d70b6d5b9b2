"""Random-weight checkpoints in Hugging Face format: config.json, model.safetensors and a small tokenizer.

Weights are drawn once, a few million of them, and every tensor is cut from that ring at an offset of its own: speed
does not depend on their values, and 8 billion draws would take minutes. Written tensor by tensor, so memory stays
small. This module knows no engine.
"""

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

RING = 1 << 22
SPREAD = 0.02  # standard deviation of weights, as models are initialised
MARKER = "complete.json"
FORMAT = 1  # raise it when what is written changes: older folders are then made anew
BYTES_PER_WEIGHT = 2


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A decoder-only model in numbers. `qk_norm`: Qwen3's norms of queries and keys."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    rope_theta: float
    max_position_embeddings: int
    qk_norm: bool = False

    @property
    def weights_per_layer(self) -> int:
        """Weights of the seven projections of one layer; norms are too small to count."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def flops_per_prefill_token(self) -> int:
        """2 FLOPs per weight of the layers. Attention scores and the logits of the last token are left out."""
        return 2 * self.num_layers * self.weights_per_layer

    @property
    def weight_bytes_per_step(self) -> int:
        """Bytes of weights that a decode step must read: the layers and the output head, in the checkpoint's type."""
        weights = self.num_layers * self.weights_per_layer + self.vocab_size * self.hidden_size
        return BYTES_PER_WEIGHT * weights

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in tensors(self))


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", "qwen3", 2, 64, 4, 2, 16, 128, 512, True, 1e4, 16384, qk_norm=True),
        ModelShape("llama-110m", "llama", 12, 768, 12, 12, 64, 2048, 32000, True, 1e4, 16384),
        ModelShape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 1e6, 40960, qk_norm=True),
        ModelShape("llama-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 5e5, 131072),
    )
}


def tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, size) of every tensor, in the order of the file. One axis: a norm."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for index in range(shape.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        if shape.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.up_proj.weight", (shape.intermediate_size, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    yield "model.norm.weight", (hidden,)
    if not shape.tie_embeddings:
        yield "lm_head.weight", (shape.vocab_size, hidden)


def make_checkpoint(shape: ModelShape, folder: Path) -> Path:
    """The folder `folder/NAME` with this shape's checkpoint, written if it is not there yet.

    Raises OSError, before a tensor is written, when the disk has too little room.
    """
    target = folder / shape.name
    wanted = {"format": FORMAT} | dataclasses.asdict(shape)
    marker = target / MARKER
    if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == wanted:
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    check_room(target, BYTES_PER_WEIGHT * shape.num_parameters)
    write_json(target / "config.json", hf_config(shape))
    write_json(target / "generation_config.json", {"do_sample": False, "eos_token_id": 1, "bos_token_id": 0})
    write_json(target / "tokenizer.json", tokenizer(shape.vocab_size))
    write_json(target / "tokenizer_config.json", tokenizer_config(shape))
    with open(target / "model.safetensors", "wb") as file:
        write_weights(shape, file)
    write_json(marker, wanted)
    return target


def check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < 1.1 * num_bytes:
        raise OSError(
            f"the weights take {num_bytes / 2**30:.1f} GiB, but {folder} has {free / 2**30:.1f} GiB left. "
            "Make room, or choose another folder with --cache-dir."
        )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def write_weights(shape: ModelShape, file: BinaryIO) -> None:
    """safetensors: the header's length, the header as JSON, then the tensors in its order, all little-endian."""
    header, end = {}, 0
    for name, size in tensors(shape):
        begin, end = end, end + BYTES_PER_WEIGHT * math.prod(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    rng = np.random.default_rng(0)
    ring = (SPREAD * rng.standard_normal(RING, dtype=np.float32)).astype(ml_dtypes.bfloat16)
    for _, size in tensors(shape):
        if len(size) == 1:
            file.write(np.ones(size, ml_dtypes.bfloat16).tobytes())
        else:
            write_from_ring(ring, int(rng.integers(RING)), math.prod(size), file)
    file.flush()
    os.fsync(file.fileno())  # nothing is left to write while engines are timed


def write_from_ring(ring: np.ndarray, start: int, count: int, file: BinaryIO) -> None:
    while count > 0:
        piece = ring[start : start + count]
        file.write(piece.tobytes())
        count, start = count - len(piece), 0


def hf_config(shape: ModelShape) -> dict:
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.model_type]
    return {
        "architectures": [architecture],
        "model_type": shape.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def tokenizer(vocab_size: int) -> dict:
    """A tokenizer with a name for every id: two special tokens, all bytes, then made-up words. It merges nothing."""
    names = ["<bos>", "<eos>", *byte_characters()]
    names += [f"Ġword{index}" for index in range(len(names), vocab_size)]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": names[index], **special} for index in (0, 1)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {name: index for index, name in enumerate(names)}, "merges": []},
    }


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers put for each byte, as GPT-2 did."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


def tokenizer_config(shape: ModelShape) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": shape.max_position_embeddings,
    }
