"""Architectures of GGUF files that have a counterpart here: its name, its fields of config.json, and its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder import dense_fields as dense
from jaxpaged.params.gguf_folder import encoder_fields as encoders
from jaxpaged.params.gguf_folder import expert_fields as experts
from jaxpaged.params.gguf_folder import hybrid_fields as hybrid
from jaxpaged.params.gguf_folder import latent_fields as latents
from jaxpaged.params.gguf_folder import tensor_names as names
from jaxpaged.params.gguf_folder.facts import Facts
from jaxpaged.params.gguf_folder.tensor_names import DENSE, Names

Vectors = dict[str, np.ndarray]
"""Small tensors, by their names in a checkpoint."""


def as_they_are(facts: Facts, vectors: Vectors) -> Vectors:
    return vectors


def with_an_axis(vector: np.ndarray) -> np.ndarray:
    return vector[None]


@dataclass(frozen=True)
class Architecture:
    """`name` and `model_type` are those of config.json, `layer` the names of a layer's tensors there, and `fields` says
    what else config.json has. `outside`: the names of tensors that are in no layer.

    `turned`: the rows of queries and keys lie in the order of interleaved rotation. `less_one`: what norms multiply is
    stored, where the checkpoint has it less 1. `is_stacked`: experts are one tensor in checkpoints that nobody
    quantised. `has_own_sizes`: `fields` says how large heads are.

    `shaped`: the names of small tensors -> what makes a checkpoint's shape of theirs; `completed` is given all of them.
    `stretched`: what the rope of config.json has besides where yarn stretches it. `layers`: the checkpoint's name of
    these. `pools_only`: an encoder.
    """

    name: str
    model_type: str
    layer: Names
    fields: Callable[[Facts], dict[str, Any]] = dense.nothing
    outside: Mapping[str, str] = field(default_factory=lambda: names.OUTSIDE)
    turned: bool = False
    less_one: bool = False
    is_stacked: bool = False
    has_own_sizes: bool = False
    shaped: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(default_factory=dict)
    completed: Callable[[Facts, Vectors], Vectors] = as_they_are
    stretched: Callable[[Facts], dict[str, Any]] = dense.nothing
    layers: str = "model.layers"
    pools_only: bool = False


OF_GEMMA = {**names.ATTENTION, **names.MLP, **names.SANDWICH_NORMS}
OF_OLMO = {**names.ATTENTION, **names.MLP, **names.POST_NORMS}
OF_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    **names.ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv": "conv.conv",
}
LFM2_OUTSIDE = {**names.OUTSIDE, "output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"}
CONVOLUTION = {"shortconv.conv": lambda taps_xt: taps_xt[:, None]}
LFM2 = Architecture("Lfm2ForCausalLM", "lfm2", OF_LFM2, dense.lfm2_fields, LFM2_OUTSIDE, shaped=CONVOLUTION)
OF_GPT_OSS = {
    **names.OTHER_PRE_NORMS,
    **names.ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    **names.of_experts(router="router"),
    **{f"ffn_{part}_exps.bias": f"mlp.experts.{part}_proj_bias" for part in ("gate", "up", "down")},
}
GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    OF_GPT_OSS,
    experts.gpt_oss_fields,
    is_stacked=True,
    completed=experts.gate_and_up_joined,
    stretched=lambda facts: {"truncate": False},
)
OF_LLAMA4 = {
    **names.PRE_NORMS,
    **names.ATTENTION,
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **names.of_experts("feed_forward", router="router"),
}
DEEPSEEK_V2 = Architecture(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    names.LATENT,
    latents.deepseek_v2_fields,
    has_own_sizes=True,
    stretched=latents.sharpness,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2, name="DeepseekV3ForCausalLM", model_type="deepseek_v3", fields=latents.deepseek_v3_fields
)
MISTRAL4 = replace(
    DEEPSEEK_V2,
    name="Mistral4ForCausalLM",
    model_type="mistral4",
    layer={**names.LATENT, **names.STACKED_GATE_AND_UP},
    fields=latents.mistral4_fields,
    is_stacked=True,
    stretched=latents.mistral4_rope,
)
MISTRAL = Architecture("MistralForCausalLM", "mistral", DENSE, lambda facts: {"sliding_window": None}, turned=True)
MINISTRAL3 = replace(
    MISTRAL,
    name="Ministral3ForCausalLM",
    model_type="ministral3",
    fields=dense.nothing,
    stretched=latents.ministral_rope,
)
BERT = Architecture(
    "BertModel",
    "bert",
    names.BERT_LAYER,
    encoders.bert_fields,
    names.BERT_OUTSIDE,
    completed=encoders.with_axes_of_one,
    layers="model.encoder.layer",
    pools_only=True,
)
BERT_WITH_SCORES = replace(
    BERT,
    name="BertForSequenceClassification",
    fields=encoders.scoring_bert_fields,
    outside={**names.BERT_OUTSIDE, **names.BERT_SCORES},
)
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", DENSE, dense.bias_fields, turned=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", DENSE),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", DENSE),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**DENSE, **names.QWEN_EXPERTS},
        experts.qwen2_moe_fields,
        shaped={"ffn_gate_inp_shexp": with_an_axis},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**DENSE, **names.QWEN_EXPERTS}, experts.qwen3_moe_fields
    ),
    "qwen2vl": Architecture("Qwen2ForCausalLM", "qwen2", DENSE, dense.of_text),
    "qwen3vl": Architecture("Qwen3ForCausalLM", "qwen3", DENSE, dense.of_text),
    "qwen3vlmoe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", {**DENSE, **names.QWEN_EXPERTS}, experts.qwen3_vl_moe_fields
    ),
    "llama4": Architecture("Llama4ForCausalLM", "llama4_text", OF_LLAMA4, experts.llama4_fields, is_stacked=True),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", OF_GEMMA, dense.gemma_fields, less_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", OF_GEMMA, dense.gemma_fields, less_one=True),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3", {**names.PRE_NORMS, **names.FUSED, **names.FUSED_MLP}, dense.phi3_fields
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", OF_OLMO),
    "glm4": Architecture(
        "Glm4ForCausalLM", "glm4", {**names.ATTENTION, **names.FUSED_MLP, **names.GLM4_NORMS}, dense.glm4_fields
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**names.OTHER_PRE_NORMS, **names.ATTENTION, **names.MLP, **names.DEEPSEEK_EXPERTS},
        experts.glm4_moe_fields,
    ),
    "gpt-oss": GPT_OSS,
    "lfm2": LFM2,
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {**OF_LFM2, **names.of_experts("feed_forward", ("w1", "w3", "w2"), correction="expert_bias")},
        experts.lfm2_moe_fields,
        LFM2_OUTSIDE,
        shaped=CONVOLUTION,
    ),
    "deepseek2": DEEPSEEK_V2,
    "mistral3": MISTRAL,
    "mistral4": MISTRAL4,
    "command-r": Architecture("CohereForCausalLM", "cohere", names.PARALLEL, dense.cohere_fields),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", names.PARALLEL, dense.cohere2_fields),
    "granite": Architecture("GraniteForCausalLM", "granite", DENSE, dense.granite_fields, turned=True),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", DENSE, dense.bias_fields, turned=True),
    "seed_oss": Architecture(
        "SeedOssForCausalLM",
        "seed_oss",
        {**names.OTHER_PRE_NORMS, **names.ATTENTION, **names.MLP},
        dense.seed_oss_fields,
    ),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", OF_OLMO, dense.exaone4_fields),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", "minimax_m2", {**DENSE, **names.MINIMAX_EXPERTS}, experts.minimax_fields
    ),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5", DENSE, dense.ernie_fields),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {**DENSE, **names.ERNIE_EXPERTS},
        experts.ernie_moe_fields,
        shaped={"exp_probs_b": with_an_axis},
    ),
    "apertus": Architecture(
        "ApertusForCausalLM",
        "apertus",
        {**names.APERTUS_NORMS, **names.ATTENTION, **names.UNGATED_MLP},
        dense.apertus_fields,
        completed=dense.with_xielu,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        "gemma4_text",
        names.GEMMA4_LAYER,
        hybrid.gemma4_fields,
        names.GEMMA4_OUTSIDE,
        is_stacked=True,
    ),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **DENSE,
            **names.FUSED_APART,
            **names.DEEPSEEK_EXPERTS,
            "attn_sinks.weight": "self_attn.attention_sink_bias",
        },
        hybrid.mimo2_fields,
        has_own_sizes=True,
    ),
    "laguna": Architecture("LagunaForCausalLM", "laguna", names.LAGUNA_LAYER, hybrid.laguna_fields),
    "bert": BERT,
    "modern-bert": Architecture(
        "ModernBertModel",
        "modernbert",
        names.MODERN_BERT_LAYER,
        encoders.modern_bert_fields,
        names.MODERN_BERT_OUTSIDE,
        pools_only=True,
    ),
    "hy_v3": Architecture("HYV3ForCausalLM", "hy_v3", {**DENSE, **names.HY3_EXPERTS}, experts.hy3_fields),
    "arcee": Architecture(
        "ArceeForCausalLM",
        "arcee",
        {**names.PRE_NORMS, **names.ATTENTION, **names.UNGATED_MLP},
        dense.arcee_fields,
        turned=True,
    ),
}
"""`general.architecture` -> what it is here."""
MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", {**DENSE, **names.MIXTRAL_EXPERTS}, experts.mixtral_fields, turned=True
)
OLMO3 = Architecture("Olmo3ForCausalLM", "olmo3", OF_OLMO, dense.olmo3_fields)
VARIANTS: Mapping[str, Mapping[str, Architecture]] = {
    "llama": {"expert_count": MIXTRAL},
    "olmo2": {"attention.sliding_window": OLMO3},
    "mistral3": {latents.GROWTH: MINISTRAL3},
    "deepseek2": {latents.GROWTH: MISTRAL4},
}
"""`general.architecture` of several models -> a fact of its own that one of them has -> that model."""


def architecture_of(facts: Facts) -> Architecture:
    """What the file holds. Raises CheckpointError for what has no counterpart."""
    name = facts.architecture
    if name == "deepseek2" and has_sigmoids(facts):
        return DEEPSEEK_V3
    if name == "bert" and encoders.has_scores(facts):
        return BERT_WITH_SCORES
    for fact, variant in VARIANTS.get(name, {}).items():
        if facts.all.get(facts.own_name(fact)):
            return variant
    if name not in ARCHITECTURES:
        kind = facts.text("general.type", "model")
        what = f"the architecture {name!r}" if kind == "model" else f"a {kind} of the architecture {name!r}"
        raise CheckpointError(
            f"{facts.path} holds {what}. Of GGUF files these are read: {', '.join(ARCHITECTURES)}. Serve the model's "
            "safetensors version; 'jaxpaged models --supported' lists models and formats."
        )
    return ARCHITECTURES[name]


def has_sigmoids(facts: Facts) -> bool:
    """Whether experts are chosen by sigmoids, of which the first files say nothing, but have a correction."""
    return facts.all.get(facts.own_name("expert_gating_func")) == experts.SIGMOID or any(
        tensor.endswith(names.CORRECTION) for tensor in facts.tensors
    )
