"""Architectures of GGUF files that have a counterpart here: its name, its fields of config.json, and its tensors.

llama.cpp calls tensors of a layer blk.N.NAME and a checkpoint model.layers.N.NAME; the tables say which is which.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.facts import Facts

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM4_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
SANDWICH_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **POST_NORMS}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Of tensors that are in no layer."""


def nothing(facts: Facts) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """`name` and `model_type` are those of config.json, `layer` the names of a layer's tensors there, and `fields` says
    what else config.json has.

    `turned`: the rows of queries and keys lie in the order of interleaved rotation. `less_one`: what norms multiply is
    stored, where the checkpoint has it less 1.
    """

    name: str
    model_type: str
    layer: Mapping[str, str]
    fields: Callable[[Facts], dict[str, Any]] = nothing
    turned: bool = False
    less_one: bool = False


def bias_fields(facts: Facts) -> dict[str, Any]:
    """What says that projections have biases, where they have."""
    found = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return {name: True for name, tensor in found.items() if tensor in facts.tensors}


def mixtral_fields(facts: Facts) -> dict[str, Any]:
    return {
        "num_local_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
    }


def expert_fields(facts: Facts) -> dict[str, Any]:
    """Of models with small experts."""
    down = facts.tensor("blk.0.ffn_down_exps.weight")
    return {
        "num_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": facts.own_count("expert_feed_forward_length", down.shape[-1]),
    }


def qwen2_moe_fields(facts: Facts) -> dict[str, Any]:
    shared = facts.tensor("blk.0.ffn_down_shexp.weight")
    return {
        **expert_fields(facts),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.own_count("expert_shared_feed_forward_length", shared.shape[-1]),
    }


def qwen3_moe_fields(facts: Facts) -> dict[str, Any]:
    is_normalised = facts.flag(facts.own_name("expert_weights_norm"), True)
    return {**expert_fields(facts), "norm_topk_prob": is_normalised}


LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest Gemmas, which scale queries by the share of a head in the width, and not by its size."""


def gemma_fields(facts: Facts) -> dict[str, Any]:
    """Of Gemma 2 and 3."""
    heads, width = facts.own_count("attention.head_count"), facts.own_count("embedding_length")
    is_largest = facts.own_count("block_count") == LARGEST[facts.architecture]
    found: dict[str, Any] = {
        "query_pre_attn_scalar": width // heads if is_largest else facts.own_count("attention.key_length"),
        "sliding_window": facts.own_count("attention.sliding_window"),
    }
    for theirs, ours in (("attn_logit", "attn_logit_softcapping"), ("final_logit", "final_logit_softcapping")):
        found[ours] = facts.own_number(f"{theirs}_softcapping")
    if facts.architecture == "gemma3":
        found["rope_local_base_freq"] = facts.own_number("rope.freq_base_swa", 10_000.0)
        found |= gemma3_windows(facts)
    return found


def gemma3_windows(facts: Facts) -> dict[str, Any]:
    """Which layers have a window: all but every so many'th, or as a list says."""
    name = facts.own_name("attention.sliding_window_pattern")
    if isinstance(facts.all.get(name), np.ndarray):
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {"layer_types": [kinds[bool(has_window)] for has_window in facts.numbers(name)]}
    return {"sliding_window_pattern": int(facts.number(name, 6))}


def phi3_fields(facts: Facts) -> dict[str, Any]:
    """Windows that no text outgrows are none."""
    window, length = facts.whole(facts.own_name("attention.sliding_window")), facts.own_count("context_length")
    return {"sliding_window": window if window and window < length else None}


def granite_fields(facts: Facts) -> dict[str, Any]:
    return {
        **bias_fields(facts),
        "embedding_multiplier": facts.own_number("embedding_scale", 1.0),
        "residual_multiplier": facts.own_number("residual_scale", 1.0),
        "attention_multiplier": facts.own_number("attention.scale", 1.0),
        "logits_scaling": facts.own_number("logit_scale", 1.0),
    }


def glm4_fields(facts: Facts) -> dict[str, Any]:
    """The share of a head that rotates is half of it where nobody says."""
    head_dim = facts.own_count("attention.key_length")
    return {
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "partial_rotary_factor": facts.own_count("rope.dimension_count", head_dim) / head_dim,
    }


def cohere_fields(facts: Facts) -> dict[str, Any]:
    """Of Command R, whose norms take off the mean."""
    eps = facts.own_number("attention.layer_norm_epsilon", 1e-5)
    return {
        "layer_norm_eps": eps,
        "rms_norm_eps": eps,
        "logit_scale": facts.own_number("logit_scale"),
    }


def cohere2_fields(facts: Facts) -> dict[str, Any]:
    """Of Command A, of whose layers every fourth sees all tokens: files do not say so."""
    every = facts.number(facts.own_name("attention.sliding_window_pattern"), 4)
    return {
        **cohere_fields(facts),
        "sliding_window": facts.own_count("attention.sliding_window"),
        "sliding_window_pattern": int(every),
    }


DENSE = {**PRE_NORMS, **ATTENTION, **MLP}
PARALLEL = {"attn_norm": "input_layernorm", **ATTENTION, **MLP}
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", DENSE, bias_fields, turned=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", DENSE),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", DENSE),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", {**DENSE, **EXPERTS}, qwen2_moe_fields),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", {**DENSE, **EXPERTS}, qwen3_moe_fields),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "gemma2", {**ATTENTION, **MLP, **SANDWICH_NORMS}, gemma_fields, less_one=True
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", {**ATTENTION, **MLP, **SANDWICH_NORMS}, gemma_fields, less_one=True
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", {**PRE_NORMS, **FUSED, **FUSED_MLP}, phi3_fields),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", {**ATTENTION, **MLP, **POST_NORMS}),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", {**ATTENTION, **FUSED_MLP, **GLM4_NORMS}, glm4_fields),
    "command-r": Architecture("CohereForCausalLM", "cohere", PARALLEL, cohere_fields),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", PARALLEL, cohere2_fields),
    "granite": Architecture("GraniteForCausalLM", "granite", DENSE, granite_fields, turned=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", DENSE, bias_fields, turned=True),
}
"""`general.architecture` -> what it is here."""
MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", {**DENSE, **MIXTRAL_EXPERTS}, mixtral_fields, turned=True)


def architecture_of(facts: Facts) -> Architecture:
    """What the file holds. Raises CheckpointError for what has no counterpart."""
    name = facts.architecture
    if name == "llama" and facts.whole("llama.expert_count"):
        return MIXTRAL
    if name not in ARCHITECTURES:
        kind = facts.text("general.type", "model")
        what = f"the architecture {name!r}" if kind == "model" else f"a {kind} of the architecture {name!r}"
        raise CheckpointError(
            f"{facts.path} holds {what}. Of GGUF files these are read: {', '.join(ARCHITECTURES)}. Serve the model's "
            "safetensors version; 'jaxpaged models --supported' lists models and formats."
        )
    return ARCHITECTURES[name]
