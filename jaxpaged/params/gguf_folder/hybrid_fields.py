"""Fields of config.json of models whose layers have unequal heads, of the facts of a GGUF file."""

from typing import Any

from jaxpaged.params.gguf_folder.dense_fields import FULL, PATTERN, SLIDING, listed_windows
from jaxpaged.params.gguf_folder.expert_fields import SIGMOID, expect_gate, expect_sums, groups, kinds_of_blocks, weighs
from jaxpaged.params.gguf_folder.facts import Facts, numbers_of

FREQUENCIES = "rope_freqs.weight"


def of_kinds(facts: Facts, counts: list[int]) -> tuple[int, int]:
    """(the number of layers that see all tokens, that of layers with a window)."""
    windows = listed_windows(facts)
    kinds = windows["layer_types"] if windows else [FULL] * len(counts)
    found = dict(zip(kinds, counts, strict=True))
    if any(found[kind] != count for kind, count in zip(kinds, counts, strict=True)):
        raise facts.error(facts.own_name("attention.head_count_kv"), counts, "one number for layers of one kind")
    full = found.get(FULL, counts[0])
    return full, next((count for kind, count in found.items() if kind != FULL), full)


def two_ropes(facts: Facts, of_full: dict[str, Any], of_windows: dict[str, Any]) -> dict[str, Any]:
    """How layers of either kind rotate."""
    full = {"rope_theta": facts.own_number("rope.freq_base", 1_000_000.0), **of_full}
    windows = {"rope_type": "default", "rope_theta": facts.own_number("rope.freq_base_swa", 10_000.0), **of_windows}
    of_kinds = {"full_attention": full, "sliding_attention": windows}
    of_all = dict.fromkeys(("rope_scaling", "rope_theta", "partial_rotary_factor"))
    return {**of_all, "rope_parameters": of_kinds}


def gemma4_fields(facts: Facts) -> dict[str, Any]:
    """Layers that see all tokens rotate a part of a head: of the frequencies that do not turn, factors are beyond all
    bounds. Where they have no values, keys are values; but the last layers, which read those of others."""
    key_heads, columns = facts.own_counts("attention.head_count_kv"), facts.own_counts("feed_forward_length")
    num_shared = facts.whole(facts.own_name("attention.shared_kv_layers")) or 0
    full_heads, heads = of_kinds(facts, key_heads)
    head_dim, full_dim = facts.own_count("attention.key_length_swa"), facts.own_count("attention.key_length")
    facts.read |= {facts.own_name(name) for name in ("attention.value_length_swa", "rope.dimension_count_swa")}
    kinds = listed_windows(facts)
    full = [i for i, kind in enumerate(kinds["layer_types"][: facts.num_layers - num_shared]) if kind == FULL]
    k_is_v = any(f"blk.{i}.attn_v.weight" not in facts.tensors for i in full)
    factors = numbers_of(facts.tensor(FREQUENCIES))
    turning = {"rope_type": "proportional", "partial_rotary_factor": float((factors < 1e9).mean())}
    return {
        **kinds,
        "intermediate_size": min(columns),
        "use_double_wide_mlp": max(columns) == 2 * min(columns),
        "head_dim": head_dim,
        "global_head_dim": full_dim,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": k_is_v,
        "num_kv_shared_layers": num_shared,
        "sliding_window": facts.own_count("attention.sliding_window"),
        "hidden_size_per_layer_input": facts.whole(facts.own_name("embedding_length_per_layer_input")) or 0,
        "final_logit_softcapping": facts.own_number("final_logit_softcapping"),
        **two_ropes(facts, turning, {}),
        **gemma4_experts(facts),
    }


def gemma4_experts(facts: Facts) -> dict[str, Any]:
    if not facts.whole(facts.own_name("expert_count")):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": facts.own_count("expert_count"),
        "top_k_experts": facts.own_count("expert_used_count"),
        "moe_intermediate_size": facts.own_count("expert_feed_forward_length"),
    }


def mimo2_fields(facts: Facts) -> dict[str, Any]:
    """Windows are said as the publisher does, who does not count the query itself. The first files do not say how
    values are scaled."""
    expect_gate(facts, SIGMOID)
    full_heads, heads = of_kinds(facts, facts.own_counts("attention.head_count_kv"))
    head_dim = facts.own_count("attention.key_length")
    part = {"partial_rotary_factor": facts.own_count("rope.dimension_count", head_dim) / head_dim}
    return {
        **listed_windows(facts),
        "num_key_value_heads": full_heads,
        "swa_num_key_value_heads": heads,
        "head_dim": head_dim,
        "v_head_dim": facts.own_count("attention.value_length", head_dim),
        "attention_value_scale": facts.own_number("attention.value_scale", 0.707),
        "sliding_window_size": facts.own_count("attention.sliding_window"),
        "n_routed_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": facts.own_count("expert_feed_forward_length"),
        "mlp_layer_types": kinds_of_blocks(facts),
        **weighs(facts),
        **groups(facts),
        **two_ropes(facts, {"rope_type": "default", **part}, part),
    }


def laguna_fields(facts: Facts) -> dict[str, Any]:
    """Only layers without a window stretch positions: the first of every four, if nothing is said."""
    expect_gate(facts, SIGMOID)
    expect_sums(facts)
    facts.read |= {facts.own_name(name) for name in ("leading_dense_block_count", "expert_shared_count")}
    heads, head_dim = facts.own_counts("attention.head_count"), facts.own_count("attention.key_length")
    window, listed = facts.whole(facts.own_name("attention.sliding_window")), listed_windows(facts)
    every = facts.own_count(PATTERN, 4) if window and not listed else 1
    gates = facts.tensor("blk.0.attn_gate.weight").shape[0] // heads[0]
    return {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "layer_types": [SLIDING if i % every else FULL for i in range(facts.num_layers)],
        **listed,
        "sliding_window": window,
        "gating": "per-element" if gates == head_dim else "per-head",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "num_experts": facts.own_count("expert_count"),
        "num_experts_per_tok": facts.own_count("expert_used_count"),
        "moe_intermediate_size": facts.own_count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.own_count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": facts.own_number("expert_weights_scale", 1.0) or 1.0,
        "mlp_layer_types": kinds_of_blocks(facts),
        "swa_rope_parameters": {
            "rope_type": "default",
            "rope_theta": facts.own_number("rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": facts.own_count("rope.dimension_count_swa", head_dim) / head_dim,
        },
    }
