"""Names and shapes of the tensors of the checkpoints in `checkpoints.py`, from the Hugging Face definitions."""

from typing import Any

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    **dict.fromkeys(("gemma2", "gemma3_text", "muse_glimmer_text"), SANDWICH_NORMS),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), POST_NORMS),
    "glm4": (*PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    **dict.fromkeys(("cohere", "cohere2"), ("input_layernorm",)),
    "apertus": ("attention_layernorm", "feedforward_layernorm"),
}
"""The norms of a layer, where they are not those of Llama."""


CORRECTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("glm4_moe", "deepseek_v3", "glm4_moe_lite", "mimo_v2_flash"), ("gate.e_score_correction_bias",)),
    "ernie4_5_moe": ("moe_statics.e_score_correction_bias", 1),
    "minimax_m2": ("e_score_correction_bias",),
    "hy_v3": ("expert_bias",),
    "laguna": ("experts.e_score_correction_bias",),
}
"""The name of what is added to scores where experts are chosen, and its axes before that of experts."""


def tensor_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint."""
    kind, width = hf["model_type"], hf["hidden_size"]
    if kind.startswith("lfm2"):
        return lfm2_shapes(hf)
    if kind == "gemma4_text":
        return gemma4_shapes(hf)
    shapes = {"model.embed_tokens.weight": (hf["vocab_size"], width), "model.norm.weight": (width,)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (hf["vocab_size"], width)
    for i in range(hf["num_hidden_layers"]):
        layer = {**attention_shapes(hf), **(expert_shapes(hf) if i in sparse_layers(hf) else mlp_shapes(hf))}
        layer |= {f"{norm}.weight": (width,) for norm in NORMS.get(kind, PRE_NORMS)}
        layer |= mimo_v2_shapes(hf, hf["layer_types"][i]) if kind == "mimo_v2_flash" else {}
        layer |= laguna_shapes(hf, hf["num_attention_heads_per_layer"][i]) if kind == "laguna" else {}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def attention_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if "kv_lora_rank" in hf:
        return latent_shapes(hf)
    width, heads, kv_heads = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    kind = hf["model_type"]
    head_dim = hf.get("head_dim", width // heads)
    if kind == "phi3":
        return {
            "self_attn.qkv_proj.weight": ((heads + 2 * kv_heads) * head_dim, width),
            "self_attn.o_proj.weight": (width, heads * head_dim),
        }
    if kind == "mimo_v2_flash":
        return {}  # see `mimo_v2_shapes`
    out_sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    shapes = {f"self_attn.{name}.weight": (size, width) for name, size in out_sizes.items()}
    shapes["self_attn.o_proj.weight"] = (width, heads * head_dim)
    if hf.get("attention_bias") or hf.get("use_bias") or kind in ("qwen2", "qwen2_moe"):
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in out_sizes.items()}
    if (hf.get("attention_bias") and not kind.startswith(("glm4", "seed"))) or hf.get("use_bias"):
        shapes["self_attn.o_proj.bias"] = (width,)
    if kind == "muse_glimmer_text":
        shapes["self_attn.gate_proj.weight"] = (heads * head_dim, width)
    if kind == "gpt_oss":
        shapes["self_attn.sinks"] = (heads,)
    if kind in ("olmo2", "olmo3", "minimax_m2"):
        shapes |= {"self_attn.q_norm.weight": (heads * head_dim,), "self_attn.k_norm.weight": (kv_heads * head_dim,)}
    elif kind in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "apertus", "hy_v3", "laguna") or (
        hf.get("use_qk_norm") and kind != "llama4_text"
    ):
        shapes |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def latent_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads, latent, of_queries = (
        hf[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    plain, rotated, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (latent + rotated, width),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (plain + value), latent),
        "o_proj.weight": (width, heads * value),
    }
    if of_queries is None:
        shapes["q_proj.weight"] = (heads * (plain + rotated), width)
    else:
        shapes |= {
            "q_a_proj.weight": (of_queries, width),
            "q_a_layernorm.weight": (of_queries,),
            "q_b_proj.weight": (heads * (plain + rotated), of_queries),
        }
    if hf.get("attention_bias"):
        shapes |= {"kv_a_proj_with_mqa.bias": (latent + rotated,), "o_proj.bias": (width,)}
        shapes |= {} if of_queries is None else {"q_a_proj.bias": (of_queries,)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def mlp_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner = hf["hidden_size"], hf["intermediate_size"]
    if hf["model_type"] == "llama4_text":
        return llama4_mlp_shapes("feed_forward", width, hf["intermediate_size_mlp"])
    if hf["model_type"] in ("phi3", "glm4"):
        return {"mlp.gate_up_proj.weight": (2 * inner, width), "mlp.down_proj.weight": (width, inner)}
    shapes = {
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }
    if hf["model_type"] in ("arcee", "apertus"):
        del shapes["mlp.gate_proj.weight"]
    if hf["model_type"] == "apertus":
        shapes |= {"mlp.act_fn.alpha_p": (1,), "mlp.act_fn.alpha_n": (1,), "mlp.act_fn.beta": (), "mlp.act_fn.eps": ()}
    if hf.get("mlp_bias") or hf.get("use_bias"):
        shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}
    return shapes


def sparse_layers(hf: dict[str, Any]) -> set[int]:
    """Layers with experts."""
    if hf["model_type"] == "llama4_text":
        step = hf["interleave_moe_layer_step"]
        return set(range(step - 1, hf["num_hidden_layers"], step))
    if "mlp_layer_types" in hf:
        return {i for i, kind in enumerate(hf["mlp_layer_types"]) if kind == "sparse"}
    if not hf["model_type"].endswith(
        ("moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "minimax_m2", "mistral4", "moe_lite")
    ):
        return set()
    first = hf.get("first_k_dense_replace", hf.get("moe_layer_start_index", 0))
    step = hf.get("decoder_sparse_step", 1)
    return set(range(first, hf["num_hidden_layers"])[step - 1 :: step]) - {*hf.get("mlp_only_layers", ())}


def expert_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, kind = hf["hidden_size"], hf["model_type"]
    if kind == "gpt_oss":
        return merged_expert_shapes(width, hf["num_local_experts"], hf["intermediate_size"])
    if kind == "llama4_text":
        merged = merged_expert_shapes(width, hf["num_local_experts"], hf["intermediate_size"]).items()
        routed = {name.replace("mlp", "feed_forward"): shape for name, shape in merged if not name.endswith("bias")}
        return {**routed, **llama4_mlp_shapes("feed_forward.shared_expert", width, hf["intermediate_size"])}
    like_mixtral = kind in ("mixtral", "minimax_m2")
    names = ("w1", "w3", "w2") if like_mixtral else ("gate_proj", "up_proj", "down_proj")
    block = "block_sparse_moe" if like_mixtral else "mlp"
    num_experts, inner = (
        next((hf[name] for name in ("num_experts", "n_routed_experts", "moe_num_experts") if name in hf), None),
        hf.get("moe_intermediate_size"),
    )
    if like_mixtral:
        num_experts, inner = hf["num_local_experts"], hf["intermediate_size"]
    blocks = {f"experts.{i}": inner for i in range(num_experts)}
    shapes = {f"{block}.{'router.gate' if kind == 'hy_v3' else 'gate'}.weight": (num_experts, width)}
    if "shared_expert_intermediate_size" in hf:
        blocks["shared_expert"] = hf["shared_expert_intermediate_size"]
    if kind == "qwen2_moe":
        shapes[f"{block}.shared_expert_gate.weight"] = (1, width)
    for field in ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"):
        if field in hf:
            blocks["shared_mlp" if kind == "hy_v3" else "shared_experts"] = hf[field] * inner
    if kind == "mistral4":
        blocks = {"shared_experts": blocks["shared_experts"]}
        shapes["mlp.experts.gate_up_proj"] = (num_experts, 2 * inner, width)
        shapes["mlp.experts.down_proj"] = (num_experts, width, inner)
    if kind in CORRECTIONS:
        name, *axes = CORRECTIONS[kind]
        shapes[f"{block}.{name}"] = (*axes, num_experts)
    for name, columns in blocks.items():
        gate, up, down = (f"{block}.{name}.{projection}.weight" for projection in names)
        shapes |= {gate: (columns, width), up: (columns, width), down: (width, columns)}
    return shapes


def llama4_mlp_shapes(block: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{block}.{name}.weight": shape for name, shape in shapes.items()}


def merged_expert_shapes(width: int, num_experts: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Of gpt-oss and Llama 4: one tensor for all experts, inputs before outputs."""
    return {
        "mlp.router.weight": (num_experts, width),
        "mlp.router.bias": (num_experts,),
        "mlp.experts.gate_up_proj": (num_experts, width, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (num_experts, 2 * inner),
        "mlp.experts.down_proj": (num_experts, inner, width),
        "mlp.experts.down_proj_bias": (num_experts, width),
    }


def lfm2_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of LFM2, whose names are its own."""
    width, num_layers = hf["hidden_size"], hf["num_hidden_layers"]
    attending = hf.get("full_attn_idxs", ())
    kinds = hf.get("layer_types") or ["full_attention" if i in attending else "conv" for i in range(num_layers)]
    shapes = {"model.embed_tokens.weight": (hf["vocab_size"], width), "model.embedding_norm.weight": (width,)}
    if not hf["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (hf["vocab_size"], width)
    for i, kind in enumerate(kinds):
        layer = lfm2_attention_shapes(hf) if kind == "full_attention" else short_conv_shapes(hf)
        is_sparse = hf["model_type"] == "lfm2_moe" and i >= hf["num_dense_layers"]
        layer |= {"operator_norm.weight": (width,), "ffn_norm.weight": (width,)}
        layer |= lfm2_expert_shapes(hf) if is_sparse else of_three("feed_forward", width, lfm2_inner(hf))
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def lfm2_inner(hf: dict[str, Any]) -> int:
    inner = hf["intermediate_size"]
    if hf["model_type"] == "lfm2_moe" or not hf.get("block_auto_adjust_ff_dim", True):
        return inner
    block = hf["block_multiple_of"]
    return -(-int(2 * inner / 3) // block) * block


def lfm2_attention_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, heads, kv_heads = hf["hidden_size"], hf["num_attention_heads"], hf["num_key_value_heads"]
    head_dim = width // heads
    return {
        "self_attn.q_proj.weight": (heads * head_dim, width),
        "self_attn.k_proj.weight": (kv_heads * head_dim, width),
        "self_attn.v_proj.weight": (kv_heads * head_dim, width),
        "self_attn.out_proj.weight": (width, heads * head_dim),
        "self_attn.q_layernorm.weight": (head_dim,),
        "self_attn.k_layernorm.weight": (head_dim,),
    }


def short_conv_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width = hf["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "conv.in_proj.weight": (3 * width, width),
        "conv.conv.weight": (width, 1, hf["conv_L_cache"]),
        "conv.out_proj.weight": (width, width),
    }
    if hf.get("conv_bias"):
        shapes |= {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}
    return shapes


def lfm2_expert_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, num_experts = hf["hidden_size"], hf["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {"feed_forward.gate.weight": (num_experts, width)}
    if hf.get("use_expert_bias", True):
        shapes["feed_forward.expert_bias"] = (num_experts,)
    for i in range(num_experts):
        shapes |= of_three(f"feed_forward.experts.{i}", width, hf["moe_intermediate_size"])
    return shapes


def of_three(block: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
    return {f"{block}.{name}.weight": shape for name, shape in shapes.items()}


def gemma4_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of Gemma 4, whose layers differ."""
    width, vocab, num_layers = hf["hidden_size"], hf["vocab_size"], hf["num_hidden_layers"]
    own = hf["hidden_size_per_layer_input"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if own:
        shapes |= {
            "model.embed_tokens_per_layer.weight": (vocab, num_layers * own),
            "model.per_layer_model_projection.weight": (num_layers * own, width),
            "model.per_layer_projection_norm.weight": (own,),
        }
    for i, kind in enumerate(hf["layer_types"]):
        is_shared = i >= num_layers - hf["num_kv_shared_layers"]
        layer = gemma4_attention_shapes(hf, kind == "full_attention", is_shared)
        inner = hf["intermediate_size"] * (2 if is_shared and hf["use_double_wide_mlp"] else 1)
        layer |= {f"mlp.{name}.weight": (inner, width) for name in ("gate_proj", "up_proj")}
        layer["mlp.down_proj.weight"] = (width, inner)
        layer |= {f"{name}.weight": (width,) for name in SANDWICH_NORMS} | {"layer_scalar": (1,)}
        if own:
            layer |= {
                "per_layer_input_gate.weight": (own, width),
                "per_layer_projection.weight": (width, own),
                "post_per_layer_input_norm.weight": (width,),
            }
        if hf.get("enable_moe_block"):
            experts, inner = hf["num_experts"], hf["moe_intermediate_size"]
            layer |= {f"{name}.weight": (width,) for name in GEMMA4_EXPERT_NORMS}
            layer |= {
                "router.proj.weight": (experts, width),
                "router.scale": (width,),
                "router.per_expert_scale": (experts,),
                "experts.gate_up_proj": (experts, 2 * inner, width),
                "experts.down_proj": (experts, width, inner),
            }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


GEMMA4_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


def gemma4_attention_shapes(hf: dict[str, Any], is_full: bool, is_shared: bool) -> dict[str, tuple[int, ...]]:
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim = hf["global_head_dim"] if is_full else hf["head_dim"]
    kv_heads = (
        hf.get("num_global_key_value_heads") or hf["num_key_value_heads"] if is_full else hf["num_key_value_heads"]
    )
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (heads * head_dim, width),
        "o_proj.weight": (width, heads * head_dim),
        "q_norm.weight": (head_dim,),
    }
    if not is_shared:
        shapes |= {"k_proj.weight": (kv_heads * head_dim, width), "k_norm.weight": (head_dim,)}
        if not (is_full and hf["attention_k_eq_v"]):
            shapes["v_proj.weight"] = (kv_heads * head_dim, width)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def mimo_v2_shapes(hf: dict[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    """A layer's attention of MiMo-V2-Flash."""
    width, heads, head_dim, value_dim = (
        hf[name] for name in ("hidden_size", "num_attention_heads", "head_dim", "v_head_dim")
    )
    has_window = kind == "sliding_attention"
    kv_heads = hf["num_key_value_heads"] * (2 if has_window else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (heads * head_dim, width),
        "k_proj.weight": (kv_heads * head_dim, width),
        "v_proj.weight": (kv_heads * value_dim, width),
        "o_proj.weight": (width, heads * value_dim),
    }
    shapes |= {"attention_sink_bias": (heads,)} if has_window else {}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def laguna_shapes(hf: dict[str, Any], heads: int) -> dict[str, tuple[int, ...]]:
    """What is as large as a layer has query heads, in Laguna."""
    width, columns = hf["hidden_size"], heads * hf["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (columns, width),
        "o_proj.weight": (width, columns),
        "g_proj.weight": (columns if hf["gating"] == "per-element" else heads, width),
    }
    shapes |= {"q_proj.bias": (columns,)} if hf.get("attention_bias") else {}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}
