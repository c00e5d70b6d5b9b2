"""GGUF files of the tiny checkpoints of tests/models, as llama.cpp's converter writes them.

That llama.cpp computes with them what transformers computes with the checkpoints is checked by
scripts/check_gguf_checkpoints.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.models.config import load_hf_config
from jaxpaged.params.hub import EMBEDDED_FOLDER
from tests.models.checkpoints import CONFIGS, random_tensors, seed_of
from tests.models.quantised_checkpoints import read, write
from tests.models.tensor_shapes import tensor_shapes
from tests.params.formats.gguf.writer import write_gguf

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "Glm4ForCausalLM": "glm4",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "Exaone4ForCausalLM": "exaone4",
    "Olmo3ForCausalLM": "olmo2",
    "ArceeForCausalLM": "arcee",
    "ApertusForCausalLM": "apertus",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2moe",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "Mistral4ForCausalLM": "mistral4",
    "Ministral3ForCausalLM": "mistral3",
    "Llama4ForCausalLM": "llama4",
    "HYV3ForCausalLM": "hy_v3",
    "MiMoV2FlashForCausalLM": "mimo2",
    "Gemma4ForCausalLM": "gemma4",
    "LagunaForCausalLM": "laguna",
}
TURNED = {"mistral3", "llama", "granite", "smollm3", "arcee"}
NAMED_AFTER_ATTENTION = {"gemma2", "gemma3", "gemma4", "olmo2", "exaone4", "seed_oss", "glm4moe", "gpt-oss"}
"""Architectures whose norm behind attention is called so, whatever it is of."""
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.g_proj": "attn_gate",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.router": "ffn_gate_inp",
    "mlp.router.gate": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "model.embedding_norm": "token_embd_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
}
OF_EXPERT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {"rope_theta": 1_000_000.0},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3": {"query_pre_attn_scalar": 12},
    "phi3": {"original_max_position_embeddings": 4096},
    "phi3_partial": {"original_max_position_embeddings": 4096},
    "olmo2": {"head_dim": None},
    "cohere": {"rope_theta": 500_000.0, "head_dim": None},
    "smollm3": {
        "no_rope_layers": None,
        "no_rope_layer_interval": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "lfm2": {"intermediate_size": 80, "block_auto_adjust_ff_dim": False, "block_multiple_of": None},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "exaone4": {"head_dim": None},
    "exaone4_full": {"head_dim": None, "sliding_window_pattern": None},
    "olmo3": {"head_dim": None},
    "ernie4_5": {"rope_theta": 500_000.0},
    "ernie4_5_moe": {"rope_theta": 500_000.0},
    "glm4_moe": {"norm_topk_prob": True},
    "deepseek_v3": {"rope_scaling": {**CONFIGS["deepseek_v3"]["rope_scaling"], "mscale": 1.0}},
    "llama4": {
        "num_hidden_layers": 4,
        "no_rope_layers": None,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_scaling": None,
    },
    "arcee": {"attention_bias": False, "mlp_bias": False},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_scaling": {**CONFIGS["gpt_oss"]["rope_scaling"], "beta_slow": 1.0}},
    "mimo_v2": {"routed_scaling_factor": 1.0},
    "laguna_per_number": {
        "attention_bias": False,
        "sliding_window": None,
        "rope_parameters": {"full_attention": {"rope_theta": 5000.0}},
    },
}
"""Name of a checkpoint -> what a GGUF file of it can say, where it cannot say what the checkpoint does."""


def config_of(name: str) -> dict[str, Any]:
    changes = CHANGES.get(name, {})
    left = {field for field, value in changes.items() if value is None}
    return {field: value for field, value in {**CONFIGS[name], **changes}.items() if field not in left}


def tensors_of_checkpoint(name: str) -> dict[str, np.ndarray]:
    hf = config_of(name)
    return random_tensors(tensor_shapes(hf), hf, seed_of(name))


def scaling_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    found = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    return found.get("full_attention", found)


def facts_of(hf: Mapping[str, Any]) -> dict[str, Any]:
    """What the header says of a config.json."""
    arch = ARCHITECTURES[hf["architectures"][0]]
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    head_dim = hf.get("head_dim") or width // heads
    own: dict[str, Any] = {
        "block_count": hf["num_hidden_layers"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": width,
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": hf.get("num_attention_heads_per_layer", heads),
        "attention.head_count_kv": hf.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(hf.get("rms_norm_eps", hf.get("norm_eps", 1e-6))),
        **({"attention.layer_norm_epsilon": hf.get("layer_norm_eps", 1e-5)} if "logit_scale" in hf else {}),
        "rope.freq_base": float(scaling_of(hf).get("rope_theta") or hf.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * (scaling_of(hf) | hf).get("partial_rotary_factor", 1)),
        "vocab_size": hf["vocab_size"],
    }
    own["rope.dimension_count"] = hf.get("rotary_dim", own["rope.dimension_count"])
    optional = {
        "num_local_experts": "expert_count",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
        "logit_scale": "logit_scale",
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "rope_local_base_freq": "rope.freq_base_swa",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "moe_num_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "moe_k": "expert_used_count",
        "n_shared_experts": "expert_shared_count",
        "moe_num_shared_experts": "expert_shared_count",
        "moe_layer_start_index": "leading_dense_block_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "num_dense_layers": "leading_dense_block_count",
        "routed_scaling_factor": "expert_weights_scale",
        "moe_routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "conv_L_cache": "shortconv.l_cache",
    }
    own |= {theirs: hf[ours] for ours, theirs in optional.items() if hf.get(ours) is not None}
    scaling = scaling_of(hf)
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
        if "original_max_position_embeddings" in scaling:
            own["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        betas = {f"rope.scaling.yarn_{name}": scaling[name] for name in ("beta_fast", "beta_slow") if name in scaling}
        own |= {name: float(value) for name, value in betas.items()}
    own |= of_one_kind(arch, hf)
    return {"general.architecture": arch, **{f"{arch}.{name}": value for name, value in own.items()}}


def of_one_kind(arch: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that converters write of some architectures only."""
    own: dict[str, Any] = {}
    if arch in ("gpt-oss", "minimax-m2"):
        own["expert_feed_forward_length"] = hf["intermediate_size"]
    if arch in ("minimax-m2", "glm4moe", "lfm2moe"):
        own["expert_gating_func"] = 2
    if arch == "llama4":
        own |= {
            "feed_forward_length": hf["intermediate_size_mlp"],
            "expert_feed_forward_length": hf["intermediate_size"],
            "interleave_moe_layer_step": hf["interleave_moe_layer_step"],
        }
    if arch == "ernie4_5-moe":
        own |= {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 48}
    if arch in ("lfm2", "lfm2moe"):
        kv_heads, kinds = hf["num_key_value_heads"], hf["layer_types"]
        own["attention.head_count_kv"] = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
    if arch == "hy_v3":
        own |= {
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": hf["router_scaling_factor"],
        }
        own["expert_shared_feed_forward_length"] = hf["moe_intermediate_size"] * hf["num_shared_experts"]
    if arch == "laguna":
        own |= laguna_facts(hf)
    if arch in ("mimo2", "gemma4"):
        own |= facts_of_kinds(arch, hf)
    if "kv_lora_rank" in hf:
        own |= latent_facts(hf)
    if arch == "mistral3":
        own |= {
            "rope.scaling.yarn_log_multiplier": scaling_of(hf)["mscale_all_dim"],
            "attention.temperature_scale": scaling_of(hf)["llama_4_scaling_beta"],
        }
    if arch in ("olmo2", "exaone4") and hf.get("sliding_window"):
        every = hf.get("sliding_window_pattern", 4)
        kinds = hf.get("layer_types") or [
            "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(hf["num_hidden_layers"])
        ]
        own["attention.sliding_window_pattern"] = [int(kind == "sliding_attention") for kind in kinds]
    return own


def facts_of_kinds(arch: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Of models whose layers with a window have other heads."""
    has_window = [int(kind == "sliding_attention") for kind in hf["layer_types"]]
    heads, ropes = hf["num_key_value_heads"], hf["rope_parameters"]
    own: dict[str, Any] = {
        "attention.sliding_window_pattern": has_window,
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
    }
    if arch == "mimo2":
        return own | {
            "attention.sliding_window": hf["sliding_window"] - 1,
            "attention.head_count_kv": [2 * heads if has else heads for has in has_window],
            "attention.value_length": hf["v_head_dim"],
            "attention.value_scale": hf["attention_value_scale"],
            "rope.dimension_count": int(hf["head_dim"] * ropes["full_attention"]["partial_rotary_factor"]),
        }
    first_shared = len(has_window) - hf["num_kv_shared_layers"]
    columns = [
        hf["intermediate_size"] * (1 + (hf["use_double_wide_mlp"] and i >= first_shared))
        for i in range(len(has_window))
    ]
    own |= {
        "attention.key_length": hf["global_head_dim"],
        "attention.value_length": hf["global_head_dim"],
        "attention.key_length_swa": hf["head_dim"],
        "attention.value_length_swa": hf["head_dim"],
        "rope.dimension_count": hf["global_head_dim"],
        "rope.dimension_count_swa": hf["head_dim"],
        "attention.shared_kv_layers": hf["num_kv_shared_layers"],
        "embedding_length_per_layer_input": hf["hidden_size_per_layer_input"],
        "feed_forward_length": columns,
        "attention.head_count_kv": [
            heads if has else hf.get("num_global_key_value_heads", heads) for has in has_window
        ],
    }
    return own | ({"expert_used_count": hf["top_k_experts"]} if "num_experts" in hf else {})


def laguna_facts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Files do not say which layers have a window, where every fourth has none."""
    own = {"expert_gating_func": 2, "expert_weights_norm": True, "leading_dense_block_count": 1}
    if "sliding_attention" not in hf["layer_types"]:
        return own
    rope = hf["rope_parameters"]["sliding_attention"]
    rotated = int(hf["head_dim"] * rope["partial_rotary_factor"])
    return {**own, "rope.freq_base_swa": rope["rope_theta"], "rope.dimension_count_swa": rotated}


def latent_facts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Of latent attention, which is that of one key head with latents for keys and values."""
    latent, rotated = hf["kv_lora_rank"], hf["qk_rope_head_dim"]
    own = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": hf["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": hf["v_head_dim"],
        "rope.dimension_count": rotated,
        "expert_gating_func": 1 if hf["model_type"] in ("deepseek_v2", "mistral4") else 2,
    }
    if hf["q_lora_rank"]:
        own["attention.q_lora_rank"] = hf["q_lora_rank"]
    scaling = scaling_of(hf)
    if "mscale_all_dim" in scaling:
        own["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    if "llama_4_scaling_beta" in scaling:
        own["attention.temperature_scale"] = scaling["llama_4_scaling_beta"]
        own["attention.temperature_length"] = scaling["original_max_position_embeddings"]
    return own


def attention_factor(hf: Mapping[str, Any]) -> dict[str, float]:
    """What longrope multiplies cos and sin with, which llama.cpp's converter computes and readers may compute too."""
    if "original_max_position_embeddings" not in hf:
        return {}
    length, original = hf["max_position_embeddings"], hf["original_max_position_embeddings"]
    factor = np.sqrt(1 + np.log(max(1, length / original)) / np.log(original))
    return {f"{ARCHITECTURES[hf['architectures'][0]]}.rope.scaling.attn_factor": float(factor)}


def turned(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of heads, which rotate halves, in the order in which neighbours rotate."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(hf: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as a GGUF file has them."""
    arch = ARCHITECTURES[hf["architectures"][0]]
    names = {
        **NAMES,
        "post_attention_layernorm": "post_attention_norm" if arch in NAMED_AFTER_ATTENTION else "ffn_norm",
    }
    made: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for full, tensor in tensors.items():
        if ".act_fn." in full:
            continue  # they are facts
        stem, end = full.rsplit(".", 1)
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = f"{stem}.".split(".", 3)
            stem = stem.removesuffix(".")
            layer = f"blk.{number}."
        if stem.endswith("kv_b_proj"):
            made |= {f"{layer}{name}.weight": own for name, own in of_latents(tensor, hf).items()}
            continue
        if found := whole_tensors(stem, end, tensor, arch):
            made |= {f"{layer}{name}": own for name, own in found.items()}
            continue
        if ".experts." in stem:
            _, number, projection = stem.rsplit(".", 2)
            experts.setdefault(f"{layer}ffn_{OF_EXPERT[projection]}_exps.weight", {})[int(number)] = tensor
            continue
        name = names[stem]
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name)
        if arch in TURNED and heads:
            tensor = turned(tensor, hf.get(heads, hf["num_attention_heads"]))
        if arch in ("gemma2", "gemma3") and name.endswith("norm"):
            tensor = tensor + np.float32(1)
        tensor = tensor[:, 0] if name == "shortconv.conv" else tensor
        made[f"{layer}{name}.{end}"] = tensor[0] if name == "ffn_gate_inp_shexp" else tensor
    stacks = {name: np.stack([own[i] for i in range(len(own))]) for name, own in experts.items()}
    return {**made, **stacks, **rope_tensors(hf)}


def of_latents(tensor: np.ndarray, hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What makes keys and values of latents, apart, and keys turned over."""
    both = tensor.reshape(hf["num_attention_heads"], -1, tensor.shape[-1])
    keys, values = np.split(both, [hf["qk_nope_head_dim"]], axis=1)
    return {"attn_k_b": np.ascontiguousarray(keys.swapaxes(1, 2)), "attn_v_b": np.ascontiguousarray(values)}


def whole_tensors(stem: str, end: str, tensor: np.ndarray, arch: str) -> dict[str, np.ndarray]:
    """Tensors whose names have no ending in the checkpoint, as they are in the file; none for others."""
    if end == "expert_bias" and arch == "hy_v3":
        return {"exp_probs_b": tensor}
    if end == "layer_scalar":
        return {"layer_output_scale.weight": tensor}
    if stem == "router" and end != "weight":
        return {"ffn_gate_inp.scale" if end == "scale" else "ffn_down_exps.scale": tensor}
    if end in ("e_score_correction_bias", "expert_bias"):
        return {"exp_probs_b.bias": tensor.reshape(-1)}
    if end in ("sinks", "attention_sink_bias"):
        return {"attn_sinks.weight": tensor}
    if end == "gate_up_proj_bias":
        return {"ffn_gate_exps.bias": tensor[:, ::2], "ffn_up_exps.bias": tensor[:, 1::2]}
    if end == "down_proj_bias":
        return {"ffn_down_exps.bias": tensor}
    if arch in ("mistral4", "gemma4") and end in ("gate_up_proj", "down_proj"):
        return {f"ffn_{end.removesuffix('_proj')}_exps.weight": tensor}
    if arch == "llama4" and end == "gate_up_proj":
        gate, up = np.split(tensor.swapaxes(1, 2), 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if end == "gate_up_proj":
        outputs_first = tensor.swapaxes(1, 2)
        return {"ffn_gate_exps.weight": outputs_first[:, ::2], "ffn_up_exps.weight": outputs_first[:, 1::2]}
    if end == "down_proj":
        return {"ffn_down_exps.weight": tensor.swapaxes(1, 2)}
    return {}


def rope_tensors(hf: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Factors of single frequencies."""
    scaling = scaling_of(hf)
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "proportional":
        pairs = hf["global_head_dim"] // 2
        turning = int(pairs * scaling["partial_rotary_factor"])
        return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (pairs - turning), np.float32)}
    if kind == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(scaling[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    if kind != "llama3":
        return {}
    head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    turns = scaling["original_max_position_embeddings"] / (
        2 * np.pi * hf["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    )
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def write_gguf_checkpoint(name: str, path: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """The checkpoint of that name as a GGUF file of float32 tensors, with further facts."""
    hf, tensors = config_of(name), tensors_of_checkpoint(name)
    found = {**facts_of(hf), **xielu_facts(tensors), **(facts or {})}
    return write_gguf(path, found, tensors_of(hf, tensors))


def xielu_facts(tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Numbers of Apertus's activations, of all layers in order."""
    found: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        if ".act_fn." in name:
            found.setdefault(f"xielu.{name.rsplit('.', 1)[1]}", []).append(float(tensor.reshape(())))
    return {name: np.array(numbers, np.float32) for name, numbers in found.items()}


def write_hf_checkpoint(name: str, folder: Path) -> Path:
    """The same as a folder."""
    folder.mkdir()
    write(folder, tensors_of_checkpoint(name), config_of(name))
    return folder


def write_demo(path: Path, **facts: Any) -> Path:
    """The embedded model, whose tokenizer splits texts nearly as "smollm" does."""
    hf = load_hf_config(EMBEDDED_FOLDER)
    tokenizer = json.loads((EMBEDDED_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted({**vocab, **special}, key={**vocab, **special}.get)
    of_tokenizer = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (EMBEDDED_FOLDER / "chat_template.jinja").read_text(encoding="utf-8"),
    }
    stored = read(EMBEDDED_FOLDER / "model.safetensors")
    tensors = {name: tensor.astype(np.float32) if tensor.ndim == 1 else tensor for name, tensor in stored.items()}
    return write_gguf(path, {**facts_of(hf), **of_tokenizer, **facts}, tensors_of(hf, tensors))
