"""Tiny random heads that draft for the tiny checkpoints, and what they draft, computed from their definitions.

The reference is numpy in float64, over whole sequences, without caches: nothing of ours is in it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.checkpoints import CONFIGS, make_tensors
from tests.models.tensor_shapes import attention_shapes, mlp_shapes

DRAFT_VOCAB = 150
TAPS_KEY, TAPS = "eagle_aux_hidden_state_layer_ids", [0, 1, 2]
EAGLE3 = {
    **CONFIGS["llama"],
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "draft_vocab_size": DRAFT_VOCAB,
    TAPS_KEY: TAPS,
    "rope_theta": 700.0,
}
"""config.json of a head for the tiny Llama."""

Tensors = dict[str, np.ndarray]


def eagle3_tensors(hf: dict[str, Any], decoder_size: int, has_embeddings: bool) -> Tensors:
    """Random weights, and which tokens the head drafts."""
    rng, width, vocab, drafts = np.random.default_rng(7), hf["hidden_size"], hf["vocab_size"], hf["draft_vocab_size"]
    layer = {**attention_shapes(hf), **mlp_shapes(hf)}
    layer |= {f"self_attn.{name}_proj.weight": (layer[f"self_attn.{name}_proj.weight"][0], 2 * width) for name in "qkv"}
    layer |= {f"{name}.weight": (width,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes = {"fc.weight": (width, 3 * decoder_size), "norm.weight": (width,), "lm_head.weight": (drafts, width)}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    if has_embeddings:
        shapes["embed_tokens.weight"] = (vocab, width)
    tensors = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        noise = noise * 0.2 + 1 if "norm" in name else noise * (2.0 if ".q_" in name or ".k_" in name else 1.0)
        tensors[name] = (noise if len(shape) == 1 or "embed" in name else noise / shape[1] ** 0.5).astype(np.float32)
    if drafts != vocab:
        known = np.sort(rng.permutation(vocab)[:drafts])
        tensors["d2t"] = (known - np.arange(drafts)).astype(np.int64)
        tensors["t2d"] = np.isin(np.arange(vocab), known)
    return tensors


OF_HEAD = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", TAPS_KEY)
"""Fields that `speculators` keeps outside of the layer's."""


def as_speculators(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json of a head as `speculators` writes it."""
    layer = {name: value for name, value in hf.items() if name not in OF_HEAD}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "has_no_defaults_at_init": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **{name: hf.get(name) for name in OF_HEAD if name in hf},
    }


def write_eagle3(
    folder: Path, decoder: str = "llama", *, has_embeddings: bool = False, speculators: bool = False, **changes: Any
) -> Path:
    """The folder of a head for the tiny checkpoint `decoder`, as the method's authors or `speculators` write it."""
    hf = {**EAGLE3, **{name: CONFIGS[decoder][name] for name in ("vocab_size", "hidden_size")}, **changes}
    tensors = eagle3_tensors(hf, CONFIGS[decoder]["hidden_size"], has_embeddings)
    if speculators:
        hf, tensors = as_speculators(hf), {key.replace("midlayer", "layers.0"): each for key, each in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


MIMO = {
    **CONFIGS["qwen2"],
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
"""config.json of the tiny Qwen 2 as a MiMo."""


def mimo_tensors() -> Tensors:
    """The tiny Qwen 2, and a layer that predicts further."""
    rng, width, name = np.random.default_rng(8), MIMO["hidden_size"], "model.mtp_layers.0"
    tensors = make_tensors("qwen2")
    tensors |= {
        key.replace("model.layers.0", name): (value[::-1] * 0.9).copy()
        for key, value in tensors.items()
        if key.startswith("model.layers.0.")
    }
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{name}.{norm}.weight"] = (1 + 0.2 * rng.standard_normal(width)).astype(np.float32)
    projection = rng.standard_normal((width, 2 * width)) / (2 * width) ** 0.5
    return {**tensors, f"{name}.input_proj.weight": projection.astype(np.float32)}


def write_mimo(folder: Path, **changes: Any) -> Path:
    """A model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**MIMO, **changes}), encoding="utf-8")
    save_file(mimo_tensors(), folder / "model.safetensors")
    return folder


class Layers:
    """Llama's arithmetic over a sequence, on the tensors of one checkpoint."""

    def __init__(self, hf: dict[str, Any], tensors: Tensors):
        self.hf, self.tensors = hf, {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def linear(self, x, name):
        bias = self.tensors.get(f"{name}.bias", 0.0)
        return x @ self.tensors[f"{name}.weight"].T + bias

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.hf["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def attention(self, x, name):
        """Causal; the first of `x` stands at position 0."""
        length, dim = len(x), self.hf.get("head_dim", self.hf["hidden_size"] // self.hf["num_attention_heads"])
        angles = np.arange(length)[:, None] * self.hf["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        split = lambda part: self.linear(x, f"{name}.{part}_proj").reshape(length, -1, dim)
        turn = lambda y: y * cos + np.concatenate([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin
        q, k, v = turn(split("q")), turn(split("k")), split("v")
        repeat = q.shape[1] // k.shape[1]
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(repeat, 1)) / dim**0.5
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v.repeat(repeat, 1)).reshape(length, -1)
        return self.linear(attended, f"{name}.o_proj")

    def mlp(self, x, name):
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(gate / (1 + np.exp(-gate)) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def layer(self, x, name):
        x = x + self.attention(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        return x + self.mlp(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")


class Decoder(Layers):
    """A tiny checkpoint of Llama or Qwen 2."""

    def __init__(self, name: str):
        super().__init__(CONFIGS[name], make_tensors(name))

    def streams(self, tokens):
        """The residual stream before each layer, and after the last."""
        streams = [self.tensors["model.embed_tokens.weight"][tokens]]
        for i in range(self.hf["num_hidden_layers"]):
            streams.append(self.layer(streams[-1], f"model.layers.{i}"))
        return streams


class Eagle3(Layers):
    """A head for a decoder, read from its folder."""

    def __init__(self, decoder: Decoder, hf: dict[str, Any], has_embeddings: bool = False):
        super().__init__(hf, eagle3_tensors(hf, decoder.hf["hidden_size"], has_embeddings))
        self.decoder = decoder

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What the head drafts, greedily, behind these tokens; the last one is the newest, not computed yet."""
        tokens, streams = list(tokens), self.decoder.streams(tokens[:-1])
        features = list(self.linear(np.concatenate([streams[tap] for tap in self.hf[TAPS_KEY]], -1), "fc"))
        drafts = []
        for _ in range(count):
            last, own = self.output(tokens[1:], np.array(features))
            drafts.append(int((np.arange(len(last)) + self.tensors.get("d2t", 0.0))[last.argmax()]))
            tokens.append(drafts[-1])
            features.append(own)
        return drafts

    def output(self, tokens, features):
        """(Logits behind the last token, the output that stands for its feature)."""
        table = self.tensors.get("embed_tokens.weight", self.decoder.tensors["model.embed_tokens.weight"])
        hidden = self.norm(features, "midlayer.hidden_norm")
        both = np.concatenate([self.norm(table[tokens], "midlayer.input_layernorm"), hidden], -1)
        x = hidden if self.hf.get("norm_before_residual") else features
        x = x + self.attention(both, "midlayer.self_attn")
        x = x + self.mlp(self.norm(x, "midlayer.post_attention_layernorm"), "midlayer.mlp")
        return self.linear(self.norm(x, "norm")[-1], "lm_head"), x[-1]


class Mimo(Layers):
    """The layer of a MiMo that predicts further."""

    def __init__(self):
        super().__init__(MIMO, mimo_tensors())
        self.decoder = Decoder("qwen2")

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """As `Eagle3.drafts`."""
        tokens, hidden = list(tokens), self.decoder.streams(tokens[:-1])[-1]
        features, table = list(self.norm(hidden, "model.norm")), self.tensors["model.embed_tokens.weight"]
        name, drafts = "model.mtp_layers.0", []
        for _ in range(count):
            hidden = self.norm(np.array(features), f"{name}.hidden_layernorm")
            both = np.concatenate([hidden, self.norm(table[tokens[1:]], f"{name}.token_layernorm")], -1)
            x = self.layer(self.linear(both, f"{name}.input_proj"), name)
            features.append(self.norm(x[-1], f"{name}.final_layernorm"))
            drafts.append(int((table @ features[-1]).argmax()))
            tokens.append(drafts[-1])
        return drafts
