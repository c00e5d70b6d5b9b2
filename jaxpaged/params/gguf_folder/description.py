"""Facts of a GGUF file -> config.json and generation_config.json of the same model."""

import math
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.reader import GgufTensor, shortest
from jaxpaged.params.gguf_folder.architectures import Architecture
from jaxpaged.params.gguf_folder.facts import Facts, numbers_of
from jaxpaged.params.gguf_folder.tokenizer import CONTROL

END_TOKENS = tuple(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <|eom_id|> <|return|> <|call|> "
    "<|observation|>".split()
)
"""Control tokens that end an answer, whatever else the file says of the end."""
HEADS, KEY_HEADS = "attention.head_count", "attention.head_count_kv"
OF_HARMONY, END_OF_MESSAGE = ("<|return|>", "<|call|>"), "<|end|>"
"""Where GPT-OSS ends an answer, of which it has several messages."""


def config_fields(facts: Facts, architecture: Architecture, modules: dict[str, Any]) -> dict[str, Any]:
    """config.json. `modules` says how matrices are stored (`schemes/gguf.py`). Raises CheckpointError."""
    own, head_dim, given = facts.own_count, head_size(facts), architecture.fields(facts)
    heads = given["num_attention_heads"] if "num_attention_heads" in given else own(HEADS)
    of_layers = {"intermediate_size": ("feed_forward_length",), "num_key_value_heads": (KEY_HEADS, heads)}
    facts.read |= {facts.own_name(name) for name, *_ in of_layers.values()}
    if not architecture.has_own_sizes and own("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{facts.path}: keys and values have other sizes, which is not read from GGUF files.")
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "torch_dtype": dtype_of(facts),
        "vocab_size": facts.tensor("token_embd.weight").shape[0],
        "hidden_size": own("embedding_length"),
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "rms_norm_eps": facts.own_number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": own("context_length"),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        **rope_fields(facts, architecture),
        **{ours: own(*theirs) for ours, theirs in of_layers.items() if ours not in given},
        **given,
        **token_ids(facts),
        "quantization_config": {"quant_method": "gguf", "modules": modules},
    }


def head_size(facts: Facts) -> int:
    heads = facts.own_counts(HEADS)[0]
    return facts.own_count("attention.key_length", max(1, facts.own_count("embedding_length") // heads))


def dtype_of(facts: Facts) -> str:
    """The type of the model's weights: float16 where the file has its matrices in that, or else bfloat16, which has
    room for all."""
    kinds = {tensor.type.name for tensor in facts.tensors.values() if len(tensor.shape) > 1} - {"F32"}
    return "float16" if kinds == {"F16"} else "bfloat16"


def rope_fields(facts: Facts, architecture: Architecture) -> dict[str, Any]:
    """How positions rotate. Factors of single frequencies, which some files have as a tensor, are longrope's."""
    head_dim = head_size(facts)
    rotated = facts.own_count("rope.dimension_count", head_dim)
    found: dict[str, Any] = {"rope_theta": facts.own_number("rope.freq_base", 10_000.0)}
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = facts.own_text("rope.scaling.type", "none")
    original = facts.whole(facts.own_name("rope.scaling.original_context_length"))
    factor, linear = facts.own_number("rope.scaling.factor"), facts.own_number("rope.scale_linear")
    kind, factor = ("linear", linear) if kind == "none" and linear else (kind, factor)
    attention = facts.own_number("rope.scaling.attn_factor")
    if "rope_freqs.weight" in facts.tensors:
        factors = vector(facts.tensors["rope_freqs.weight"])
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    elif "rope_factors_long.weight" in facts.tensors:
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": vector(facts.tensor("rope_factors_short.weight")),
            "long_factor": vector(facts.tensor("rope_factors_long.weight")),
        }
        if attention:
            found["rope_scaling"]["attention_factor"] = attention
        if original:
            found["original_max_position_embeddings"] = original
    elif kind in ("linear", "yarn") and factor:
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            found["rope_scaling"] |= yarn_fields(facts, factor, original, attention) | architecture.stretched(facts)
    elif kind not in ("none", "linear", "yarn", "longrope"):
        raise CheckpointError(f"{facts.path}: positions are stretched by {kind!r}, which is not read from GGUF files.")
    return found if "rope_scaling" in found else {**found, "rope_parameters": {"rope_type": "default"}}


def yarn_fields(facts: Facts, factor: float, original: int | None, attention: float | None) -> dict[str, Any]:
    """What yarn has besides its factor."""
    said, by_yarn = facts.own_number("rope.scaling.yarn_attn_factor", 1.0), 0.1 * math.log(factor) + 1
    if said != 1 and not math.isclose(said, by_yarn, rel_tol=1e-4):
        raise facts.error(facts.own_name("rope.scaling.yarn_attn_factor"), said, f"1, or {by_yarn:.4f} as yarn has it")
    if attention not in (None, 1.0):
        raise facts.error(facts.own_name("rope.scaling.attn_factor"), attention, "1 beside yarn")
    named = {f"beta_{which}": facts.own_number(f"rope.scaling.yarn_beta_{which}") for which in ("fast", "slow")}
    named["original_max_position_embeddings"] = original
    return {name: value for name, value in named.items() if value is not None}


def vector(tensor: GgufTensor) -> list[float]:
    """The numbers of a small tensor."""
    return [shortest(number) for number in numbers_of(tensor)]


def token_ids(facts: Facts) -> dict[str, Any]:
    """The ids that begin and end a text."""
    ends = [facts.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = facts.texts("tokenizer.ggml.tokens"), facts.numbers("tokenizer.ggml.token_type")
    by_text = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds)) if kind == CONTROL}
    if all(token in by_text for token in OF_HARMONY):
        by_text.pop(END_OF_MESSAGE, None)
    ends += [by_text.get(token) for token in END_TOKENS]
    found: dict[str, Any] = {"eos_token_id": sorted({end for end in ends if end is not None})}
    begin = facts.whole("tokenizer.ggml.bos_token_id")
    return found if begin is None else {**found, "bos_token_id": begin}
