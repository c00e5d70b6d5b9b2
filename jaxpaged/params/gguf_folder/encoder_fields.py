"""Fields of config.json of encoders, of the facts of a GGUF file, and what sentence-transformers would say of them.

Files of RoBERTa's kin are BERTs: their tables of positions begin with the first token.
"""

from typing import Any

from jaxpaged.params.gguf_folder.facts import Facts

POOLING = {1: "mean_tokens", 2: "cls_token", 3: "lasttoken"}
"""Numbers of llama.cpp -> ends of names of sentence-transformers."""
OF_DECODERS = ("rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling")
"""Fields that encoders do not have, or not under this name."""


def sees_both_ways(facts: Facts) -> None:
    """CheckpointError for an encoder that does not."""
    if facts.flag(name := facts.own_name("attention.causal"), False):
        raise facts.error(name, True, "false, as of every encoder")


def bert_fields(facts: Facts) -> dict[str, Any]:
    sees_both_ways(facts)
    return {
        **dict.fromkeys(OF_DECODERS),
        "layer_norm_eps": facts.own_number("attention.layer_norm_epsilon", 1e-12),
        "hidden_act": facts.own_text("hidden_activation", "gelu"),
        "type_vocab_size": facts.tensor("token_types.weight").shape[0],
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
    say."""
    kind = facts.whole(name := facts.own_name("pooling_type")) or 0
    if kind and kind not in POOLING:
        raise facts.error(name, kind, f"one of {', '.join(map(str, POOLING))}; rerankers are not read from GGUF files")
    if not kind:
        return {}
    steps = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{step}", "path": path} for step, path in steps.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{POOLING[kind]}": True}}
