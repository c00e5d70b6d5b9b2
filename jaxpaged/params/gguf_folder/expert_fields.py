"""Fields of config.json of models with experts, of the facts of a GGUF file."""

from typing import Any

import numpy as np

from jaxpaged.params.gguf_folder.dense_fields import lfm2_fields, of_text
from jaxpaged.params.gguf_folder.facts import Facts

SOFTMAX, SIGMOID = 1, 2
"""How scores of experts are made, in the numbers of llama.cpp."""


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


def expect_gate(facts: Facts, kind: int) -> None:
    """CheckpointError where experts are chosen in another way than the architecture's."""
    name = facts.own_name("expert_gating_func")
    if facts.whole(name) not in (None, 0, kind):
        raise facts.error(name, facts.all[name], f"{kind}, or nothing")


def expect_sums(facts: Facts) -> None:
    """CheckpointError where weights of a token's experts do not add up to one number."""
    if not facts.flag(name := facts.own_name("expert_weights_norm"), True):
        raise facts.error(name, False, "true, as of all models of this kind")


def weighs(facts: Facts, default: bool = True) -> dict[str, Any]:
    """How weights of a token's experts are made."""
    return {
        "norm_topk_prob": facts.flag(facts.own_name("expert_weights_norm"), default),
        "routed_scaling_factor": facts.own_number("expert_weights_scale", 1.0) or 1.0,
    }


def groups(facts: Facts) -> dict[str, Any]:
    """Groups of experts, of some of which a token has its own."""
    names = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
    return {ours: facts.whole(facts.own_name(theirs)) or 1 for ours, theirs in names.items()}


def num_shared(facts: Facts, width: int) -> int:
    """Of experts of all tokens, as they are said, or as wide as their block is."""
    said = facts.whole(facts.own_name("expert_shared_count"))
    found = (tensor.shape[-1] for name, tensor in facts.tensors.items() if name.endswith("ffn_down_shexp.weight"))
    return next(found, 0) // width if said is None else said


def qwen3_vl_moe_fields(facts: Facts) -> dict[str, Any]:
    return {**of_text(facts), **qwen3_moe_fields(facts)}


def llama4_fields(facts: Facts) -> dict[str, Any]:
    """Of the published models, the one with 128 experts does not normalise queries and keys, which files do not say."""
    num_experts = facts.own_count("expert_count")
    return {
        "num_local_experts": num_experts,
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "intermediate_size": facts.own_count("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.own_count("feed_forward_length"),
        "interleave_moe_layer_step": facts.own_count("interleave_moe_layer_step"),
        "use_qk_norm": num_experts != 128,
    }


def gpt_oss_fields(facts: Facts) -> dict[str, Any]:
    """Positions are stretched by yarn without rounding, which files do not say."""
    return {
        "num_local_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "intermediate_size": facts.own_count("expert_feed_forward_length"),
        "sliding_window": facts.own_count("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
    }


def gate_and_up_joined(facts: Facts, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GPT-OSS's vectors, where biases of gates and of what they weigh take turns in one."""
    found = dict(vectors)
    for i in range(facts.num_layers):
        start = f"model.layers.{i}.mlp.experts"
        names = [f"{start}.{part}_proj_bias" for part in ("gate", "up")]
        if all(name in found for name in names):
            both_EQ = [found.pop(name) for name in names]
            found[f"{start}.gate_up_proj_bias"] = np.stack(both_EQ, axis=-1).reshape(len(both_EQ[0]), -1)
    return found


def minimax_fields(facts: Facts) -> dict[str, Any]:
    expect_gate(facts, SIGMOID)
    return {
        **mixtral_fields(facts),
        "intermediate_size": facts.own_count("expert_feed_forward_length", facts.own_count("feed_forward_length")),
    }


def glm4_moe_fields(facts: Facts) -> dict[str, Any]:
    """Of GLM-4.5."""
    expect_gate(facts, SIGMOID)
    width, head_dim = facts.own_count("expert_feed_forward_length"), facts.own_count("attention.key_length")
    return {
        "n_routed_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": width,
        "n_shared_experts": num_shared(facts, width),
        "first_k_dense_replace": facts.whole(facts.own_name("leading_dense_block_count")) or 0,
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
        "partial_rotary_factor": facts.own_count("rope.dimension_count", head_dim // 2) / head_dim,
        **weighs(facts),
        **groups(facts),
    }


def ernie_moe_fields(facts: Facts) -> dict[str, Any]:
    """Of ERNIE 4.5. What files say of the width of shared experts is none of theirs."""
    expect_gate(facts, SOFTMAX)
    facts.read.add(facts.own_name("expert_shared_feed_forward_length"))
    width = facts.own_count("expert_feed_forward_length")
    return {
        "moe_num_experts": facts.own_count("expert_count"),
        "moe_k": facts.own_count("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": num_shared(facts, width),
        "moe_layer_start_index": facts.whole(facts.own_name("leading_dense_block_count")) or 0,
        "moe_layer_interval": facts.own_count("interleave_moe_layer_step", 1),
    }


def kinds_of_blocks(facts: Facts) -> list[str]:
    """Of each layer, whether it has experts: those that have a router."""
    has_router = (f"blk.{i}.ffn_gate_inp.weight" in facts.tensors for i in range(facts.num_layers))
    return ["sparse" if has else "dense" for has in has_router]


def hy3_fields(facts: Facts) -> dict[str, Any]:
    expect_gate(facts, SIGMOID)
    facts.read.add(facts.own_name("leading_dense_block_count"))
    expect_sums(facts)
    width = facts.own_count("expert_feed_forward_length")
    shared = facts.own_count("expert_shared_feed_forward_length", width * num_shared(facts, width))
    return {
        "num_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": width,
        "num_shared_experts": shared // width,
        "mlp_layer_types": kinds_of_blocks(facts),
        "router_scaling_factor": facts.own_number("expert_weights_scale", 1.0) or 1.0,
    }


def lfm2_moe_fields(facts: Facts) -> dict[str, Any]:
    expect_gate(facts, SIGMOID)
    fields = lfm2_fields(facts)
    del fields["block_auto_adjust_ff_dim"]
    return {
        **fields,
        "num_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": facts.own_count("expert_feed_forward_length"),
        "num_dense_layers": facts.whole(facts.own_name("leading_dense_block_count")) or 0,
        "use_expert_bias": any("exp_probs_b" in name for name in facts.tensors),
        **weighs(facts),
    }
