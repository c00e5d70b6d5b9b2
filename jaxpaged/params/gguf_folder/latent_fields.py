"""Fields of config.json of models with latent attention, and of Mistral's, whose queries grow, of the facts of a GGUF
file."""

from typing import Any

from jaxpaged.params.gguf_folder.expert_fields import SIGMOID, SOFTMAX, expect_gate, groups, num_shared, weighs
from jaxpaged.params.gguf_folder.facts import Facts

GROUPS_OF = {(256, 7168): (8, 4), (160, 5120): (8, 3)}
"""Experts and width of DeepSeek-V3 and V2 -> groups of experts, and those of a token, of which their first files say
nothing."""
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
GROWTH, GROWTH_LENGTH = "attention.temperature_scale", "attention.temperature_length"


def latent_fields(facts: Facts) -> dict[str, Any]:
    """What all of them have alike. Sizes of heads are those of keys and values that latents stand for; first files have
    no others."""
    own, heads = facts.own_count, facts.own_count("attention.head_count")
    rotated, width = own("rope.dimension_count"), own("expert_feed_forward_length")
    key = own("attention.key_length_mla", own("attention.key_length"))
    value = own("attention.value_length_mla", own("attention.value_length"))
    num_experts = own("expert_count")
    found = {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": own("attention.kv_lora_rank"),
        "q_lora_rank": facts.whole(facts.own_name("attention.q_lora_rank")) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "n_routed_experts": num_experts,
        "num_experts_per_tok": own("expert_used_count"),
        "n_shared_experts": num_shared(facts, width),
        "moe_intermediate_size": width,
        "first_k_dense_replace": facts.whole(facts.own_name("leading_dense_block_count")) or 0,
        **groups(facts),
    }
    if facts.own_name("expert_group_count") not in facts.all:
        known = GROUPS_OF.get((num_experts, own("embedding_length")), (1, 1))
        found |= dict(zip(("n_group", "topk_group"), known, strict=True))
    return found


def deepseek_v3_fields(facts: Facts) -> dict[str, Any]:
    """Also of Kimi-K2 and GLM-4.7-Flash."""
    expect_gate(facts, SIGMOID)
    return {**latent_fields(facts), **weighs(facts)}


def deepseek_v2_fields(facts: Facts) -> dict[str, Any]:
    expect_gate(facts, SOFTMAX)
    found = latent_fields(facts)
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return {**found, "topk_method": method, **weighs(facts, default=False)}


def mistral4_fields(facts: Facts) -> dict[str, Any]:
    """Of Mistral Small 4, and Large 3."""
    expect_gate(facts, SOFTMAX)
    return {**latent_fields(facts), **weighs(facts)}


def sharpness(facts: Facts) -> dict[str, Any]:
    """How DeepSeek's yarn makes scores sharper, which files have a tenth of."""
    tenth = facts.own_number(LOG_MULTIPLIER)
    if not tenth:
        return {}
    return dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * tenth, 6))


def growth(facts: Facts, default: float | None = None) -> dict[str, Any]:
    """How queries grow with their position, from the length on that the model was trained on first."""
    length, trained = (facts.own_name(name) for name in (GROWTH_LENGTH, "rope.scaling.original_context_length"))
    if facts.whole(length) not in (None, 0, facts.whole(trained)):
        raise facts.error(length, facts.all[length], f"what {trained} is")
    beta = facts.own_number(GROWTH, default)
    return {"llama_4_scaling_beta": beta} if beta else {}


def ministral_rope(facts: Facts) -> dict[str, Any]:
    """What Ministral 3's yarn has besides its factor."""
    all_dim = facts.own_number(LOG_MULTIPLIER)
    return {**({"mscale": 1.0, "mscale_all_dim": all_dim} if all_dim else {}), **growth(facts)}


def mistral4_rope(facts: Facts) -> dict[str, Any]:
    """What Mistral 4's yarn has besides its factor. Files say nothing of the growth, which published models have."""
    return {**sharpness(facts), **growth(facts, 0.1)}
