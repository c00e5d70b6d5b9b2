"""A folder in Mistral's own format, params.json and consolidated*.safetensors -> config.json, and where tensors lie
under the names that a Hugging Face checkpoint has for them.

Rows of queries and keys lie in the order in which neighbours of a head are rotated together, and are put in that of
halves when they are read. Of models for text: dense ones, and those with Mixtral's experts. Names of fields are those
of mistral-inference, and of what vLLM reads.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.other_formats import PARAMS, is_mistral_folder
from jaxpaged.params.safetensors_reader import ReorderedTensor, TensorEntry
from jaxpaged.params.schemes.gguf import rows_in_file

MISTRAL_WEIGHTS, MISTRAL_INDEX = "consolidated*.safetensors", "consolidated.safetensors.index.json"

COUNTS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""Fields that are whole numbers -> those of config.json."""
MOST = {"n_layers": 10_000}
NEEDED = COUNTS.keys() - {"n_kv_heads", "head_dim"}
LENGTHS = ("max_position_embeddings", "max_seq_len")
DEFAULT_LENGTH = 128_000
"""Where none of these is said: the one that vLLM takes."""
RENAMED = {
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
"""Fields that config.json has under another name, or the same."""
OF_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
OF_EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
NEUTRAL = {"model_type": "transformer", "model_parallel": 1, "causal": True, "use_cache": True}
"""Fields that change nothing as long as they have this value."""
READ = {*COUNTS, *LENGTHS, *RENAMED, "dtype", "sliding_window", "moe", "yarn", "llama_4_scaling", "quantization"}

OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{part}": f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"attention.{part}_fake_quantizer": f"self_attn.{part}" for part in ("q", "k", "v", "kv")},
    **{f"feed_forward.w{i}": f"mlp.{part}_proj" for i, part in ((1, "gate"), (2, "down"), (3, "up"))},
    "feed_forward.gate": "block_sparse_moe.gate",
    **{f"feed_forward.experts.N.w{i}": f"block_sparse_moe.experts.N.w{i}" for i in (1, 2, 3)},
}
"""Modules of a layer; N is the number of an expert."""
OWN_WORDS = {
    "config.json": PARAMS,
    **{theirs: ours for ours, theirs in (COUNTS | RENAMED).items()},
    **{theirs: f"yarn.{ours}" for ours, theirs in OF_YARN.items()},
    "llama_4_scaling_beta": "llama_4_scaling.beta",
    **{theirs: f"moe.{ours}" for ours, theirs in OF_EXPERTS.items()},
    "quantization_config": "quantization",
}
"""What errors about config.json call something -> its name in params.json."""
THEIR_WORDS = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, OWN_WORDS))})(?!\w)")
NAME = re.compile(r"(?:layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<end>weight|qscale_weight|qscale_act)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
ENDS = {"weight": ".weight", "qscale_weight": ".weight_scale", "qscale_act": ".input_scale"}
USE_OTHER = "Name the model's version in Hugging Face format, with config.json."


def description_of(folder: Path) -> dict[str, Any]:
    """What config.json would say. Raises CheckpointError."""
    path = folder / PARAMS
    try:
        params = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Download the model again.") from error
    if not isinstance(params, dict):
        raise CheckpointError(f"{path} holds a {type(params).__name__}, not a JSON object. Download the model again.")
    refuse_unknown(path, params)
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": params.get("dtype") or "bfloat16",
        "max_position_embeddings": length(path, params),
        **counts(path, params),
        **{theirs: params[ours] for ours, theirs in RENAMED.items() if params.get(ours) is not None},
        **windows(path, params),
        **positions(path, params),
        **experts(path, params),
        **quantization(path, params),
    }


def refuse_unknown(path: Path, params: Mapping[str, Any]) -> None:
    """CheckpointError for what may change what the model computes, and is not read."""
    for name, found in params.items():
        if name in READ or found in (None, False, [], {}) or (name in NEUTRAL and found == NEUTRAL[name]):
            continue
        if name in ("vision_encoder", "multimodal"):
            raise CheckpointError(
                f"{path} describes a model that also reads images or audio ({name}); of Mistral's own format only "
                f"models for text are read. {USE_OTHER}"
            )
        raise wrong(path, name, found, "nothing is known of this field, and it may change what the model computes")


def counts(path: Path, params: Mapping[str, Any]) -> dict[str, int]:
    for name in COUNTS:
        found = params.get(name)
        if found is None and name in NEEDED:
            raise CheckpointError(f"{path} lacks {name}. Is this the model's complete {PARAMS}?")
        most = MOST.get(name, 2**31 - 1)
        if found is not None and (type(found) is not int or not 0 < found <= most):
            raise wrong(path, name, found, f"it must be a whole number from 1 to {most:,}")
    return {theirs: params[ours] for ours, theirs in COUNTS.items() if params.get(ours) is not None}


def length(path: Path, params: Mapping[str, Any]) -> int:
    """The longest text."""
    name = next((name for name in LENGTHS if params.get(name) is not None), None)
    found = DEFAULT_LENGTH if name is None else params[name]
    if type(found) is not int or not 0 < found < 2**31:
        raise wrong(path, str(name), found, f"it must be a whole number from 1 to {2**31 - 1:,}")
    return found


def windows(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """One window of all layers, or a list of windows, which comes again and again."""
    found = params.get("sliding_window")
    found = int(found) if isinstance(found, str) and found.isdecimal() else found
    each = found if isinstance(found, list) and found else [found]
    sizes = {size for size in each if type(size) is int}
    if len(sizes) > 1 or any(size is not None and type(size) is not int for size in each):
        raise wrong(
            path, "sliding_window", found, "it must be a number of tokens, or a list of one such number and null"
        )
    if len({*each}) == 1:
        return {"sliding_window": each[0]}
    kinds = ["full_attention" if size is None else "sliding_attention" for size in each]
    return {"sliding_window": sizes.pop(), "layer_types": list(islice(cycle(kinds), params["n_layers"]))}


def positions(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are stretched by yarn, and how queries grow with them."""
    yarn, growth = mapping(path, params, "yarn"), mapping(path, params, "llama_4_scaling")
    if not yarn and not growth:
        return {}
    refuse_others(path, "yarn", yarn, {*OF_YARN, "apply_scale"})
    refuse_others(path, "llama_4_scaling", growth, {"original_max_position_embeddings", "beta"})
    if missing := {*OF_YARN} - yarn.keys():
        raise wrong(path, "yarn", yarn, f"{min(missing)} is missing")
    rope = {"rope_type": "yarn", **{theirs: yarn[ours] for ours, theirs in OF_YARN.items()}}
    if "rope_theta" in params:
        rope["rope_theta"] = params["rope_theta"]
    if yarn.get("apply_scale") is False:
        rope["attention_factor"] = 1.0
    if not growth:
        return {"rope_parameters": rope}
    original = rope["original_max_position_embeddings"]
    if growth.get("original_max_position_embeddings") != original or "beta" not in growth:
        raise wrong(path, "llama_4_scaling", growth, f"it must have beta, and the {original} tokens of yarn")
    of_ministral = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return {**of_ministral, "rope_parameters": {**rope, "llama_4_scaling_beta": growth["beta"]}}


def experts(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Mixtral's experts, where every layer has some."""
    moe = mapping(path, params, "moe")
    if not moe:
        return {}
    refuse_others(path, "moe", moe, set(OF_EXPERTS))
    for name in OF_EXPERTS:
        if type(moe.get(name)) is not int or moe[name] < 1:
            raise wrong(path, f"moe.{name}", moe.get(name), "it must be a whole number of at least 1")
    if params.get("llama_4_scaling"):
        raise wrong(path, "llama_4_scaling", params["llama_4_scaling"], "beside moe it is not supported")
    found = {theirs: moe[ours] for ours, theirs in OF_EXPERTS.items()}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **found}


def quantization(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """FP8 with one scale for a matrix."""
    given = mapping(path, params, "quantization")
    if not given:
        return {}
    refuse_others(path, "quantization", given, {"qformat_weight", "qscheme_act"})
    if given.get("qformat_weight") != "fp8_e4m3" or given.get("qscheme_act") not in (None, "TENSOR", "NO_SCALES"):
        raise wrong(path, "quantization", given, "of Mistral's own format only qformat_weight fp8_e4m3 is read")
    return {"quantization_config": {"quant_method": "fp8"}}


def mapping(path: Path, params: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = params.get(name) or {}
    if not isinstance(found, dict):
        raise wrong(path, name, found, "it must be an object")
    return found


def refuse_others(path: Path, name: str, found: Mapping[str, Any], known: set[str]) -> None:
    for other, value in found.items():
        if other not in known and value not in (None, False, 0):
            raise wrong(path, f"{name}.{other}", value, "nothing is known of this field")


@contextmanager
def in_own_words(folder: Path) -> Iterator[None]:
    """Errors about what `description_of` says name what params.json says, of a folder that is described so."""
    try:
        yield
    except CheckpointError as error:
        if not is_mistral_folder(folder):
            raise
        words = THEIR_WORDS.sub(lambda found: OWN_WORDS[found[0]], str(error))
        raise CheckpointError(f"{words} {USE_OTHER}") from error


def wrong(path: Path, name: str, found: Any, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name} is {repr(found)[:80]}; {why}. {USE_OTHER}")


def in_checkpoint(entry: TensorEntry, hf: Mapping[str, Any]) -> TensorEntry:
    """A tensor of the file under its name in a Hugging Face checkpoint, with rows in the order of that. CheckpointError
    for one that no such model has."""
    found = NAME.fullmatch(entry.name)
    module = EXPERT.sub(".experts.N.", found["module"]) if found else ""
    known = LAYER if found and found["layer"] else OUTSIDE
    if not found or module not in known:
        raise CheckpointError(
            f"{entry.path} holds {entry.name}, which is no part of a model in Mistral's own format as it is known "
            f"here. {USE_OTHER}"
        )
    number, end = EXPERT.search(found["module"]), ENDS[found["end"]]
    name = known[module].replace("N", number[1]) if number else known[module]
    end = "_scale" if module.endswith("_fake_quantizer") else end
    full = f"model.layers.{found['layer']}.{name}{end}" if found["layer"] else f"{name}{end}"
    place = {**vars(entry), "name": full}
    heads = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}.get(module)
    if heads is None or end != ".weight":
        return TensorEntry(**place)
    num_heads = hf.get(heads, hf["num_attention_heads"])
    if len(entry.shape) != 2 or entry.shape[0] % (2 * num_heads):
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} has shape {entry.shape}, whose rows are not those of the {num_heads} "
            f"heads of {PARAMS}. Check that it belongs to these weights."
        )
    return ReorderedTensor(**place, rows=rows_in_file(entry.shape[0], num_heads))
