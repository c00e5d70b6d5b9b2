"""A checkpoint of ours as GGUF, for llama.cpp: `write_gguf.py FOLDER TYPE` writes FOLDER/model-TYPE.gguf.

It runs with the Python of the llama.cpp environment, which has the `gguf` package. The file has no vocabulary: prompts
are token ids. TYPE is bf16, q8_0 or q4_0; with q4_0 tables of the vocabulary have 8 bits, as with our own 4-bit
weights. Norms are float32, as llama.cpp wants them. Names and keys: gguf's own constants.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
TABLES = ("token_embd.weight", "output.weight")
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        return NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}"


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, bfloat16 bits as uint16), mapped from the file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, np.memmap(path, np.uint16, "r", 8 + length + begin, ((end - begin) // 2,)).reshape(entry["shape"])


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's rope for Llama wants them: pairs that rotate together are neighbours."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def add_config(writer: gguf.GGUFWriter, config: dict, file_type: gguf.LlamaFileType) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("no_vocab")


def add_matrix(writer: gguf.GGUFWriter, name: str, bits: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """A matrix of bfloat16 bits, as such or rounded."""
    if kind == gguf.GGMLQuantizationType.BF16:
        return writer.add_tensor(name, bits.view(np.uint8), raw_dtype=kind)
    if kind == gguf.GGMLQuantizationType.Q4_0 and name in TABLES:
        kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(floats(bits), kind), raw_dtype=kind)


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write(folder: Path, target: Path, kind: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(target, config["model_type"], use_temp_file=False)
    tensor_type, file_type = TYPES[kind]
    add_config(writer, config, file_type)
    for name, bits in read_tensors(folder / "model.safetensors"):
        part = name.split(".")[-2]
        if config["model_type"] == "llama" and part in heads:
            bits = interleaved(bits, heads[part])
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), floats(bits))
        else:
            add_matrix(writer, gguf_name(name), bits, tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    target = folder / f"model-{kind}.gguf"
    partial = target.with_suffix(".partial")
    write(folder, partial, kind)
    partial.rename(target)


if __name__ == "__main__":
    main()
