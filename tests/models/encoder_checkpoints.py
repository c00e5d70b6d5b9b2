"""Tiny random encoders with tokenizers: embedding models, rerankers and a classifier.

Names and shapes are from the Hugging Face definitions. Needs neither jax nor torch.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, pre_tokenizers, processors

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 210,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
BERT = {
    **BASE,
    "architectures": ["BertModel"],
    "model_type": "bert",
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "attention_probs_dropout_prob": 0.1,
    "position_embedding_type": "absolute",
}
XLM_ROBERTA = {
    **BERT,
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
MODERNBERT = {
    **BASE,
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "max_position_embeddings": 64,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 1000.0,
    "local_rope_theta": 100.0,
    "position_embedding_type": "absolute",
    "classifier_pooling": "mean",
}
ONE, THREE = {"id2label": {"0": "fits"}}, {"id2label": {"0": "no", "1": "yes", "2": "so so"}}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "bert_embed": BERT,
    "bert_score": {**BERT, "architectures": ["BertForSequenceClassification"], **ONE},
    "xlm_roberta_embed": XLM_ROBERTA,
    "xlm_roberta_score": {**XLM_ROBERTA, "architectures": ["XLMRobertaForSequenceClassification"], **ONE},
    "modernbert_embed": MODERNBERT,
    "modernbert_classify": {
        **MODERNBERT,
        "architectures": ["ModernBertForSequenceClassification"],
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), True),
        **THREE,
    },
}
WORDS = [f"w{i}" for i in np.random.default_rng(3).integers(5, 210, 60)]
TEXTS = [" ".join(WORDS[:38]), " ".join(WORDS[38:41]), " ".join(WORDS[41:58])]
PAIRS = [(TEXTS[2], TEXTS[1]), (TEXTS[2], TEXTS[2]), (TEXTS[2], " ".join(WORDS[:34]))]
"""Texts to embed or to classify, and pairs to score, one with many."""


def write(name: str, folder: Path) -> Path:
    """The complete model folder of one checkpoint. Layers of a model without a head have names without a prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = CHECKPOINTS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    tensors = {key: noise(rng, key, shape) for key, shape in shapes(hf).items()}
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer_of(hf).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": TOKENIZERS[hf["model_type"]]}))
    return folder


def noise(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Queries and keys are large, so that a wrong place or window shows."""
    values = rng.standard_normal(shape, dtype=np.float32)
    if "norm" in name.lower():
        return values * np.float32(0.2) + np.float32(name.endswith("weight"))
    if len(shape) == 1:
        return values * np.float32(0.3)
    if "embeddings" in name:
        return values
    large = any(part in name for part in ("query", "key", "Wqkv"))
    return values * np.float32((2.0 if large else 1.0) / shape[1] ** 0.5)


def shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    found = modernbert_shapes(hf) if hf["model_type"] == "modernbert" else bert_shapes(hf)
    if not hf["architectures"][0].endswith("Classification"):
        return found
    prefix = {"bert": "bert", "xlm-roberta": "roberta", "modernbert": "model"}[hf["model_type"]]
    layers = {f"{prefix}.{name}": shape for name, shape in found.items() if not name.startswith("pooler")}
    return layers | head_shapes(hf)


def linear(name: str, out: int, into: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if bias else {})}


def norm(name: str, width: int, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def bert_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, columns = hf["hidden_size"], hf["intermediate_size"]
    tables = {"word": hf["vocab_size"], "position": hf["max_position_embeddings"], "token_type": hf["type_vocab_size"]}
    found = {f"embeddings.{name}_embeddings.weight": (rows, width) for name, rows in tables.items()}
    found |= norm("embeddings.LayerNorm", width) | linear("pooler.dense", width, width)
    for i in range(hf["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            found |= linear(f"{layer}.attention.{name}", width, width)
        found |= norm(f"{layer}.attention.output.LayerNorm", width) | norm(f"{layer}.output.LayerNorm", width)
        found |= linear(f"{layer}.intermediate.dense", columns, width) | linear(f"{layer}.output.dense", width, columns)
    return found


def modernbert_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, columns = hf["hidden_size"], hf["intermediate_size"]
    of_norms, of_mlp, of_heads = (hf.get(f"{name}_bias", False) for name in ("norm", "mlp", "attention"))
    found = {"embeddings.tok_embeddings.weight": (hf["vocab_size"], width)}
    found |= norm("embeddings.norm", width, of_norms) | norm("final_norm", width, of_norms)
    for i in range(hf["num_hidden_layers"]):
        layer = f"layers.{i}"
        found |= norm(f"{layer}.attn_norm", width, of_norms) if i else {}
        found |= norm(f"{layer}.mlp_norm", width, of_norms)
        found |= linear(f"{layer}.attn.Wqkv", 3 * width, width, of_heads) | linear(
            f"{layer}.attn.Wo", width, width, of_heads
        )
        found |= linear(f"{layer}.mlp.Wi", 2 * columns, width, of_mlp) | linear(
            f"{layer}.mlp.Wo", width, columns, of_mlp
        )
    return found


def head_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, labels = hf["hidden_size"], len(hf["id2label"])
    if hf["model_type"] == "bert":
        return linear("bert.pooler.dense", width, width) | linear("classifier", labels, width)
    if hf["model_type"] == "xlm-roberta":
        return linear("classifier.dense", width, width) | linear("classifier.out_proj", labels, width)
    head = linear("head.dense", width, width, hf["classifier_bias"]) | norm("head.norm", width, hf["norm_bias"])
    return head | linear("classifier", labels, width)


TOKENIZERS = {"bert": "BertTokenizer", "xlm-roberta": "XLMRobertaTokenizer", "modernbert": "PreTrainedTokenizerFast"}


def tokenizer_of(hf: dict[str, Any]) -> tokenizers.Tokenizer:
    """The word "w7" is token id 7. Special tokens are put around texts and between them as each kind of model does."""
    bert = hf["model_type"] == "bert"
    first, last = ("[CLS]", "[SEP]") if bert else ("<s>", "</s>")
    ids = {first: 2 if bert else 0, last: 3 if bert else 2}
    vocab = ids | {"<pad>": hf["pad_token_id"] if hf["pad_token_id"] not in ids.values() else 4}
    vocab |= {f"w{i}": i for i in range(5, hf["vocab_size"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    between = f"{last}:0" if bert or hf["model_type"] == "modernbert" else f"{last}:0 {last}:0"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first}:0 $A:0 {between} $B:1 {last}:1",
        special_tokens=list(ids.items()),
    )
    return backend


def tokens_of(hf: dict[str, Any], *texts: str) -> tuple[list[int], list[int]]:
    """Ids of a text or of a pair, and which of the two each token is of, as far as the model is told."""
    encoding = tokenizer_of(hf).encode(*texts)
    return encoding.ids, encoding.type_ids if hf["model_type"] == "bert" else [0] * len(encoding.ids)
