"""Fields of config.json of models without experts, of the facts of a GGUF file."""

from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.facts import Facts

FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"
"""What `layer_types` calls kinds of layers."""


def nothing(facts: Facts) -> dict[str, Any]:
    return {}


def of_text(facts: Facts) -> dict[str, Any]:
    """Of a model that sees, whose file has the language model only: of text, whose tokens have one position, sections
    of a head rotate alike."""
    facts.read |= {facts.own_name(name) for name in ("rope.dimension_sections", "n_deepstack_layers")}
    return {}


def bias_fields(facts: Facts) -> dict[str, Any]:
    """What says that projections have biases, where they have."""
    found = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
    return {name: True for name, tensor in found.items() if tensor in facts.tensors}


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
    return listed_windows(facts) or {"sliding_window_pattern": int(facts.own_number(PATTERN, 6))}


PATTERN = "attention.sliding_window_pattern"


def listed_windows(facts: Facts) -> dict[str, Any]:
    """Which layers have a window, where a list says so."""
    name = facts.own_name(PATTERN)
    if not isinstance(facts.all.get(name), np.ndarray):
        return {}
    return {"layer_types": [SLIDING if has_window else FULL for has_window in facts.numbers(name)[: facts.num_layers]]}


def phi3_fields(facts: Facts) -> dict[str, Any]:
    """Windows that no text outgrows are none."""
    window, length = facts.whole(facts.own_name("attention.sliding_window")), facts.own_count("context_length")
    return {"sliding_window": window if window and window < length else None}


def seed_oss_fields(facts: Facts) -> dict[str, Any]:
    has = lambda name: f"blk.0.{name}.bias" in facts.tensors
    return {
        "attention_bias": has("attn_q"),
        "attention_out_bias": has("attn_output"),
        "mlp_bias": has("ffn_gate"),
    }


def exaone4_fields(facts: Facts) -> dict[str, Any]:
    """Files of models without windows say nothing of them."""
    window = facts.whole(facts.own_name("attention.sliding_window"))
    if not window:
        return {"sliding_window": None}
    return {"sliding_window": window, **(listed_windows(facts) or {"sliding_window_pattern": 4})}


def olmo3_fields(facts: Facts) -> dict[str, Any]:
    return {
        **bias_fields(facts),
        "sliding_window": facts.own_count("attention.sliding_window"),
        **listed_windows(facts),
    }


def arcee_fields(facts: Facts) -> dict[str, Any]:
    found = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {"hidden_act": "relu2", **{name: True for name, tensor in found.items() if tensor in facts.tensors}}


def apertus_fields(facts: Facts) -> dict[str, Any]:
    return {"hidden_act": "xielu", **bias_fields(facts)}


XIELU = ("alpha_p", "alpha_n")
XIELU_CONSTANTS = {"beta": 0.5, "eps": -1e-6}


def with_xielu(facts: Facts, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Apertus's vectors with those of its activations, which are facts. CheckpointError for constants of an activation
    that are others than Apertus's."""
    for name, constant in XIELU_CONSTANTS.items():
        found = facts.numbers(f"xielu.{name}")
        if not np.allclose(found, constant, rtol=0.01):  # bfloat16 of some files
            raise CheckpointError(f"{facts.path}: the fact xielu.{name} is {str(found)[:80]}; {constant} is read.")
    of_layers = {name: facts.numbers(f"xielu.{name}") for name in XIELU}
    named = {
        f"model.layers.{i}.mlp.act_fn.{name}": np.array([number], np.float32)
        for name, numbers in of_layers.items()
        for i, number in enumerate(numbers)
    }
    return {**vectors, **named}


def ernie_fields(facts: Facts) -> dict[str, Any]:
    return {"use_bias": "blk.0.attn_q.bias" in facts.tensors}


def lfm2_fields(facts: Facts) -> dict[str, Any]:
    """Layers without key heads have a convolution."""
    heads = facts.numbers(facts.own_name("attention.head_count_kv"))
    return {
        "layer_types": [FULL if count else CONV for count in heads],
        "conv_L_cache": facts.own_count("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in facts.tensors),
        "block_auto_adjust_ff_dim": False,
    }


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
