"""What llama.cpp calls tensors of a layer, blk.N.NAME, and what a checkpoint does, model.layers.N.NAME.

A name with an ending, `attn_sinks.weight`, is the whole of one, and so is then what it stands for. Braces stand for the
number of an expert; a tensor that has several matrices, one after the other, has as many names.
"""

from collections.abc import Mapping

Names = Mapping[str, str | tuple[str, ...]]

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
UNGATED_MLP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
OTHER_PRE_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
"""The same, where llama.cpp calls the second after what is before it."""
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
SANDWICH_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **POST_NORMS}
APERTUS_NORMS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
HEADS_TOGETHER = "attn_qkv"
FUSED_APART = {HEADS_TOGETHER: tuple(f"self_attn.{part}_proj" for part in "qkv")}
"""The same, of checkpoints that have them apart."""
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
DENSE = {**PRE_NORMS, **ATTENTION, **MLP}
PARALLEL = {"attn_norm": "input_layernorm", **ATTENTION, **MLP}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Of tensors that are in no layer."""
CORRECTION = "exp_probs_b.bias"
"""What is added to scores where experts are chosen."""
BARE_CORRECTION = "exp_probs_b"
"""The same in files of architectures whose converter gives it no ending."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def of_experts(
    block: str = "mlp", projections: tuple[str, str, str] = PROJECTIONS, router: str = "gate", correction: str = ""
) -> dict[str, str]:
    """The names of a block of experts; `correction` is the end of its name."""
    kinds = ("gate", "up", "down")
    names = {f"ffn_{kind}_exps": f"{block}.experts.{{}}.{one}" for kind, one in zip(kinds, projections, strict=True)}
    found = {"ffn_gate_inp": f"{block}.{router}", **names}
    return {**found, CORRECTION: f"{block}.{correction}"} if correction else found


def of_shared(block: str) -> dict[str, str]:
    """The names of the experts of all tokens."""
    return {f"ffn_{kind}_shexp": f"mlp.{block}.{kind}_proj" for kind in ("gate", "up", "down")}


QWEN_EXPERTS = {**of_experts(), **of_shared("shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
MIXTRAL_EXPERTS = of_experts("block_sparse_moe", ("w1", "w3", "w2"))
MINIMAX_EXPERTS = of_experts("block_sparse_moe", ("w1", "w3", "w2"), correction="e_score_correction_bias")
DEEPSEEK_EXPERTS = {**of_experts(correction="gate.e_score_correction_bias"), **of_shared("shared_experts")}
HY3_EXPERTS = {**of_experts(router="router.gate", correction="expert_bias"), **of_shared("shared_mlp")}
HY3_EXPERTS[BARE_CORRECTION] = HY3_EXPERTS[CORRECTION]
LAGUNA_LAYER = {
    **DENSE,
    **of_experts(correction="experts.e_score_correction_bias"),
    **of_shared("shared_expert"),
    "attn_gate": "self_attn.g_proj",
}
GEMMA4_LAYER = {
    **ATTENTION,
    **MLP,
    **SANDWICH_NORMS,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
GEMMA4_OUTSIDE = {
    **OUTSIDE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
BERT_LAYER = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
BERT_OUTSIDE = {
    "token_embd": "model.embeddings.word_embeddings",
    "position_embd": "model.embeddings.position_embeddings",
    "token_types": "model.embeddings.token_type_embeddings",
    "token_embd_norm": "model.embeddings.LayerNorm",
}
BERT_SCORES = {"cls": "model.pooler.dense", "cls.output": "classifier"}
"""What makes scores of the first token, of RoBERTa's kin, too, who compute the same under other names."""
MODERN_BERT_LAYER = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
MODERN_BERT_OUTSIDE = {
    "token_embd": "model.embeddings.tok_embeddings",
    "token_embd_norm": "model.embeddings.norm",
    "output_norm": "model.final_norm",
}
ERNIE_EXPERTS = {**of_experts(correction="moe_statics.e_score_correction_bias"), **of_shared("shared_experts")}
LATENT = {
    **PRE_NORMS,
    **MLP,
    **DEEPSEEK_EXPERTS,
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": "self_attn.kv_b_proj.k_b",
    "attn_v_b.weight": "self_attn.kv_b_proj.v_b",
    "attn_output": "self_attn.o_proj",
}
"""Of latent attention. What makes keys of latents and what makes values are two tensors, of all heads each."""
OF_KEYS, OF_VALUES = ".k_b", ".v_b"
"""Ends of names of these."""
STACKED_GATE_AND_UP = {"ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")}
