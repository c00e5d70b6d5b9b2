"""Fields of config.json of encoders, of the facts of a GGUF file, and what sentence-transformers would say of them.

Files of RoBERTa's kin are BERTs: their tables of positions begin with the first token.
"""

from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.facts import Facts

RANK = 4
POOLING = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""Numbers of llama.cpp -> ends of names of sentence-transformers."""
HIDDEN, SCORES = "cls.weight", "cls.output.weight"
ONE_ROW = ("model.embeddings.token_type_embeddings.weight", "classifier.weight")
"""Names of matrices in a checkpoint that may have one row."""
OF_DECODERS = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling")
"""Fields that encoders do not have, or not under this name."""


def sees_both_ways(facts: Facts) -> None:
    """CheckpointError for an encoder that does not."""
    if facts.flag(name := facts.own_name("attention.causal"), False):
        raise facts.error(name, True, "false, as of every encoder")


def has_scores(facts: Facts) -> bool:
    """Whether a file is that of a model which gives scores. CheckpointError where something of it is missing."""
    if facts.all.get(facts.own_name("pooling_type")) != RANK and SCORES not in facts.tensors:
        return False
    if missing := [name for name in (HIDDEN, SCORES) if name not in facts.tensors]:
        raise CheckpointError(
            f"{facts.path} holds a model that gives scores, but not {missing[0]}, which makes them of hidden states. "
            "Converters leave out that of BERT itself, and write that of RoBERTa and XLM-RoBERTa. Serve the model's "
            "safetensors version."
        )
    return True


def scoring_bert_fields(facts: Facts) -> dict[str, Any]:
    """With as many labels as there are scores."""
    scores, labels = facts.tensor(SCORES), facts.texts(name := facts.own_name("classifier.output_labels"))
    num_labels = scores.shape[0] if len(scores.shape) > 1 else 1
    if labels and len(labels) != num_labels:
        raise facts.error(name, labels, f"a list of {num_labels}, as many as there are scores")
    facts.read.add(name)
    labels = labels or [f"LABEL_{i}" for i in range(num_labels)]
    return {**bert_fields(facts), "id2label": {str(i): label for i, label in enumerate(labels)}}


def with_axes_of_one(facts: Facts, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices of one row as such: files may have them as vectors."""
    rows = {name for name in ONE_ROW if name in vectors and vectors[name].ndim == 1}
    return vectors | {name: vectors[name][None] for name in rows}


def bert_fields(facts: Facts) -> dict[str, Any]:
    sees_both_ways(facts)
    types = facts.tensor("token_types.weight").shape
    return {
        **dict.fromkeys(OF_DECODERS),
        "layer_norm_eps": facts.own_number("attention.layer_norm_epsilon", 1e-12),
        "hidden_act": facts.own_text("hidden_activation", "gelu"),
        "type_vocab_size": types[0] if len(types) > 1 else 1,
    }


def modern_bert_fields(facts: Facts) -> dict[str, Any]:
    """The first of every few layers sees all tokens, and rotates in another way."""
    sees_both_ways(facts)
    return {
        **dict.fromkeys(OF_DECODERS),
        "norm_eps": facts.own_number("attention.layer_norm_epsilon", 1e-5),
        "hidden_activation": facts.own_text("hidden_activation", "gelu"),
        "local_attention": facts.own_count("attention.sliding_window"),
        "global_attn_every_n_layers": facts.own_count("attention.sliding_window_pattern", 3),
        "global_rope_theta": facts.own_number("rope.freq_base", 160_000.0),
        "local_rope_theta": facts.own_number("rope.freq_base_swa", 10_000.0),
        "norm_bias": "output_norm.bias" in facts.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in facts.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.tensors,
    }


def pooling_files(facts: Facts) -> dict[str, Any]:
    """File name -> its content: how hidden states become a vector of length one; nothing where the file does not
    say, or the model gives scores."""
    kind = facts.whole(name := facts.own_name("pooling_type")) or 0
    if not kind or SCORES in facts.tensors:
        return {}
    if kind not in POOLING:
        kinds = ", ".join(map(str, POOLING))
        raise facts.error(name, kind, f"one of {kinds}; of rerankers only those of BERT are read")
    steps = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{step}", "path": path} for step, path in steps.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{POOLING[kind]}": True}}
