"""Tiny random checkpoints of every architecture, made from seeds: the same in the suite and when goldens are recorded.

Needs numpy and safetensors only, since the recording runs in an environment without jax. Names and shapes are
written down here from the Hugging Face definitions and not taken from our own specs, which they test.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.tensor_shapes import tensor_shapes

PROMPT_LENGTH = 40
NUM_GREEDY = 12

BASE = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 211,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5000.0}
MISTRAL = {**BASE, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 10000.0}
QWEN2 = {
    **{name: value for name, value in BASE.items() if name != "head_dim"},
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_attention_heads": 8,
    "hidden_size": 64,
    "rope_theta": 1000000.0,
}
QWEN3 = {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "vocab_size": 223}
GEMMA2 = {
    **{name: value for name, value in BASE.items() if name != "hidden_act"},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 0.8,
}
GEMMA3 = {
    **{name: value for name, value in BASE.items() if name != "hidden_act"},
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "sliding_window": 10,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 10,
    "rope_theta": 50000.0,
    "rope_local_base_freq": 100.0,
}
MIXTRAL = {
    **BASE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "sliding_window": None,
}
QWEN2_MOE = {
    **QWEN2,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 56,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
PHI3 = {
    **BASE,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 64,
    "head_dim": 8,
    "original_max_position_embeddings": 128,
}
GLM4 = {
    **BASE,
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
GLM4_MOE = {
    **BASE,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.7,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
}
OLMO2 = {**BASE, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
OLMO3 = {
    **BASE,
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 20000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 16,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    },
}
GRANITE = {
    **BASE,
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
    "tie_word_embeddings": True,
}
SMOLLM3 = {
    **BASE,
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "no_rope_layers": [1, 0],
    "use_sliding_window": True,
    "sliding_window": 12,
    "rope_theta": 5000.0,
}
SEED_OSS = {
    **BASE,
    "architectures": ["SeedOssForCausalLM"],
    "model_type": "seed_oss",
    "attention_bias": True,
    "attention_out_bias": False,
    "residual_dropout": 0.1,
}
EXAONE4 = {
    **BASE,
    "architectures": ["Exaone4ForCausalLM"],
    "model_type": "exaone4",
    "sliding_window": 10,
    "sliding_window_pattern": 2,
}
COHERE = {
    **{name: value for name, value in BASE.items() if name != "rms_norm_eps"},
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.7,
    "tie_word_embeddings": True,
}
GPT_OSS = {
    **BASE,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "attention_bias": True,
    "swiglu_limit": 1.5,
    "rope_theta": 300.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
}
DEEPSEEK_V2 = {
    **{name: value for name, value in BASE.items() if name not in ("head_dim", "num_key_value_heads")},
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "rope_theta": 5000.0,
}
DEEPSEEK_V3 = {
    **DEEPSEEK_V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 18,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4,
        "beta_slow": 1,
        "mscale": 0.8,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 64,
}
LLAMA4 = {
    **BASE,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 24,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.7,
    "rope_theta": 500.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 16,
    },
}
LONGROPE_DIVISORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 5.0]}

LFM2 = {
    **{name: value for name, value in BASE.items() if name not in ("head_dim", "rms_norm_eps", "hidden_act")},
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "intermediate_size": 120,
    "block_multiple_of": 16,
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if name != "block_multiple_of"},
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "conv_L_cache": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
}

ARCEE = {**BASE, "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}
APERTUS = {**BASE, "architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
ERNIE4_5 = {**BASE, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5"}
ERNIE4_5_MOE = {
    **{name: value for name, value in BASE.items() if name != "head_dim"},
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "tie_word_embeddings": True,
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_num_shared_experts": 2,
    "moe_intermediate_size": 24,
    "moe_layer_start_index": 1,
}
COHERE2 = {
    **{name: value for name, value in COHERE.items() if name != "head_dim"},
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "hidden_size": 64,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
}
MINIMAX_M2 = {
    **BASE,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "intermediate_size": 40,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rotary_dim": 6,
    "rope_theta": 5000.0,
}
HY_V3 = {
    **BASE,
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "router_scaling_factor": 1.7,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
MINISTRAL3 = {
    **BASE,
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.7,
    },
}
GLM4_MOE_LITE = {
    **DEEPSEEK_V3,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "n_group": 1,
    "topk_group": 1,
    "v_head_dim": 16,
}
MISTRAL4 = {
    **{name: value for name, value in DEEPSEEK_V3.items() if name not in ("topk_method", "scoring_func")},
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "qk_nope_head_dim": 6,
    "first_k_dense_replace": 0,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": {**MINISTRAL3["rope_parameters"], "partial_rotary_factor": 0.5},
}

GEMMA4 = {
    **{name: value for name, value in BASE.items() if name not in ("hidden_act", "intermediate_size")},
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "global_head_dim": 16,
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 211,
    "final_logit_softcapping": 0.8,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
    },
}
GEMMA4_MOE = {
    **GEMMA4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}

MIMO_V2 = {
    **BASE,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "num_hidden_layers": 3,
    "head_dim": 16,
    "v_head_dim": 10,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "attention_value_scale": 0.6,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}

MUSE_GLIMMER = {
    **{name: value for name, value in BASE.items() if name != "hidden_act"},
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "model_type": "muse_glimmer_text",
    "hidden_activation": "silu",
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [5000.0, 5000.0, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "qk_scale_factor": 2.5,
    "output_multiplier": 0.4,
    "final_logit_softcapping": 1.5,
    "post_norm_eps": 1e-3,
}

LAGUNA = {
    **BASE,
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "num_attention_heads_per_layer": [8, 16],
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "gating": "per-head",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "moe_routed_scaling_factor": 1.7,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    },
}
LAGUNA_PER_NUMBER = {
    **{name: value for name, value in LAGUNA.items() if name != "rope_parameters"},
    "num_attention_heads_per_layer": [8, 8],
    "layer_types": ["full_attention", "full_attention"],
    "gating": "per-element",
    "attention_bias": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama_mqa_bias_tied": {
        **LLAMA,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "vocab_size": 257,
    },
    "llama_linear": {**LLAMA, "max_position_embeddings": 16, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_dynamic": {
        **LLAMA,
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.5},
    },
    "llama_yarn": {
        **LLAMA,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 300.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_yarn_mscale": {
        **LLAMA,
        "max_position_embeddings": 64,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "truncate": False,
        },
    },
    "llama3": {
        **LLAMA,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "llama_longrope": {
        **LLAMA,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "longrope", **LONGROPE_DIVISORS},
    },
    "mistral_window": {**MISTRAL, "sliding_window": 11},
    "mistral_full": {**MISTRAL, "sliding_window": None, "head_dim": 20, "num_key_value_heads": 8},
    "qwen2": {**QWEN2, "use_sliding_window": False, "tie_word_embeddings": True},
    "qwen2_window": {
        **QWEN2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {**QWEN3, "attention_bias": False, "rope_theta": 1000000.0},
    "qwen3_bias": {
        **QWEN3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "mixtral": MIXTRAL,
    "mixtral_window_top1": {**MIXTRAL, "num_experts_per_tok": 1, "sliding_window": 11},
    "qwen2_moe": QWEN2_MOE,
    "qwen2_moe_all": {**QWEN2_MOE, "num_experts_per_tok": 6, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen3_moe": QWEN3_MOE,
    "gemma2": GEMMA2,
    "gemma2_uncapped": {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma3_new_spelling": {
        **{name: value for name, value in GEMMA3.items() if not name.startswith(("rope", "sliding_window_p"))},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "final_logit_softcapping": 1.0,
        "dtype": "float32",
    },
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "granite": GRANITE,
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "exaone4": EXAONE4,
    "exaone4_full": {**EXAONE4, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "cohere": COHERE,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v2_groups_top1": {
        **DEEPSEEK_V2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 3,
        "num_experts_per_tok": 1,
        "q_lora_rank": 14,
        "attention_bias": True,
        "routed_scaling_factor": 1.6,
        "v_head_dim": 16,
        "first_k_dense_replace": 0,
        "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale": 0.7},
        "max_position_embeddings": 64,
    },
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_all": {
        **DEEPSEEK_V3,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 16,
        "rope_scaling": None,
        "rope_interleave": False,
        "vocab_size": 223,
    },
    "llama4": LLAMA4,
    "llama4_top3": {
        **LLAMA4,
        "num_experts_per_tok": 3,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
    },
    "arcee": {**ARCEE, "attention_bias": True, "mlp_bias": True},
    "apertus": APERTUS,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_bias": {**ERNIE4_5, "use_bias": True, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "ernie4_5_moe": ERNIE4_5_MOE,
    "cohere2": COHERE2,
    "minimax_m2": MINIMAX_M2,
    "hy_v3": HY_V3,
    "ministral3": MINISTRAL3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "mistral4": MISTRAL4,
    "gemma4": GEMMA4,
    "gemma4_moe": GEMMA4_MOE,
    "mimo_v2": MIMO_V2,
    "muse_glimmer": MUSE_GLIMMER,
    "laguna": LAGUNA,
    "laguna_per_number": LAGUNA_PER_NUMBER,
    "lfm2": LFM2,
    "lfm2_bias": {
        **{name: value for name, value in LFM2.items() if name not in ("layer_types", "rope_theta")},
        "conv_bias": True,
        "conv_L_cache": 7,
        "full_attn_idxs": [0, 2],
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": 80,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": False,
    },
    "lfm2_moe": LFM2_MOE,
    "lfm2_moe_plain": {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    "phi3": {**PHI3, "sliding_window": 13},
    "phi3_partial": {
        **PHI3,
        "partial_rotary_factor": 0.75,
        "num_key_value_heads": 8,
    },
    "phi3_longrope_short": {
        **PHI3,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", **LONGROPE_DIVISORS},
    },
    "phi3_longrope_long": {
        **PHI3,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "longrope", **LONGROPE_DIVISORS},
    },
}
"""Name of a checkpoint -> its config.json, in the spellings of transformers 4 and 5."""


SALTS = {
    "lfm2_moe_plain": 1,
    "ernie4_5_bias": 1,
    "gemma4": 1,
    "deepseek_v3_all": 1,
    "qwen2_window": 1,
    "gemma3": 1,
    "gemma3_new_spelling": 1,
}
"""Where the greedy continuation was nearly a tie with the first seed."""


def seed_of(name: str) -> int:
    """The same number in every process, unlike `hash`."""
    return zlib.crc32(name.encode()) + SALTS.get(name, 0)


def prompt_of(name: str) -> list[int]:
    """The prompt whose logits are recorded."""
    rng = np.random.default_rng(seed_of(name) + 1)
    return rng.integers(3, CONFIGS[name]["vocab_size"], PROMPT_LENGTH).tolist()


LARGE = ("q_proj", "k_proj", "qkv", "q_b_proj", "kv_b_proj")
"""Parts of names of tensors that are larger than others."""


OFFSET_NORMS = ("gemma2", "gemma3", "muse_glimmer")
"""Beginnings of names of models whose norms say how far a factor is from 1."""
OUTPUTS_FIRST = ("mistral4", "gemma4_text")
"""Models whose experts are one tensor with outputs before inputs."""


def make_tensors(name: str) -> dict[str, np.ndarray]:
    """Float32 weights of a checkpoint."""
    return random_tensors(tensor_shapes(CONFIGS[name]), CONFIGS[name], seed_of(name))


def random_tensors(shapes: dict[str, tuple[int, ...]], hf: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Float32 weights of these names and shapes, of a text model that `hf` describes. Queries and keys are large, so
    that a wrong position or window shows in the logits."""
    rng, tensors = np.random.default_rng(seed), {}
    for tensor, shape in shapes.items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if tensor.endswith(("act_fn.beta", "act_fn.eps")):
            noise = np.full(shape, 0.5 if tensor.endswith("beta") else -1e-6)
        elif "norm" in tensor or ".ln_" in tensor or tensor.endswith(("scalar", "scale")):
            noise = noise * 0.2 + (0.0 if hf["model_type"].startswith(OFFSET_NORMS) else 1.0)
        elif (tensor.endswith("bias") and not tensor.endswith("sink_bias")) or ".act_fn." in tensor:
            noise = noise * 0.3
        elif tensor.endswith(("sinks", "sink_bias")):
            noise = noise * 2.0
        elif tensor.endswith(("gate_up_proj", "down_proj")):
            noise = noise / np.float32(shape[2 if hf["model_type"] in OUTPUTS_FIRST else 1] ** 0.5)
            noise = rounded_to_mxfp4(noise) if hf["model_type"] == "gpt_oss" else noise
        elif "embed" in tensor:
            # A tied table that is large would make every token predict itself.
            noise = noise * (0.05 if hf["tie_word_embeddings"] else 1.0)
        else:
            noise = noise * (2.0 if any(part in tensor for part in LARGE) else 1.0)
            noise = noise / np.float32(shape[1] ** 0.5)
        tensors[tensor] = noise.astype(np.float32)
    return tensors


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the 16 codes of a number in 4 bits mean."""


def fp4_groups(weight_EIO: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes [E, O, groups, 32], exponents [E, O, groups]) of the nearest numbers in MXFP4, in groups of 32 inputs."""
    groups = weight_EIO.swapaxes(1, 2).reshape(*weight_EIO.shape[::2], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2
    return np.abs((groups / 2.0 ** exponents[..., None])[..., None] - FP4).argmin(axis=-1), exponents


def rounded_to_mxfp4(weight_EIO: np.ndarray) -> np.ndarray:
    codes, exponents = fp4_groups(weight_EIO)
    return (FP4[codes] * 2.0 ** exponents[..., None]).reshape(weight_EIO.swapaxes(1, 2).shape).swapaxes(1, 2)


def packed_in_mxfp4(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same checkpoint of gpt-oss as it is published: two tensors of bytes for each of the experts' weights."""
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            packed[name] = tensor
            continue
        codes, exponents = fp4_groups(tensor)
        packed[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
        packed[f"{name}_scales"] = (exponents + 127).astype(np.uint8)
    return packed


def write_packed_checkpoint(name: str, folder: Path, **changes: np.ndarray) -> Path:
    """A model folder with experts in MXFP4; `changes` are tensors in place of others."""
    config = {**CONFIGS[name], "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {**packed_in_mxfp4(make_tensors(name)), **changes}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_checkpoint(name: str, folder: Path) -> Path:
    """A model folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(make_tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
