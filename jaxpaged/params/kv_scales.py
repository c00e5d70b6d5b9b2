"""Scales of cached keys and values: those that checkpoints carry, in every spelling, and files of their own.

A file is JSON as vLLM's `--quantization-param-path` took it:

    {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02, "1": 0.03}}}}

Of each rank of tensor parallelism the scale of each layer, of keys and values alike. Here a layer's may also be
{"k": 0.02, "v": 0.01}, and any of these a list with one number for each kv head. Several ranks have the heads in turn.
What is stored times its scale is what is meant. This module does not know where scales lie on devices.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params.safetensors_reader import DTYPES, TensorEntry, mapped

LayerScales = dict[int, tuple[np.ndarray, np.ndarray]]
"""Layer -> scales of keys and of values, float32, () or [kv heads]."""

ATTENTION = r"model\.layers\.(?P<layer>\d+)\.(?:self_attn|attn|attention|mixer)\."
SPELLINGS = (
    rf"{ATTENTION}(?:attn\.)?(?P<part>kv|k|v)_scale",
    rf"{ATTENTION}(?:qkv_proj|qkqkv_proj)\.(?:attn\.)?(?P<part>k|v)_scale",
    rf"{ATTENTION}(?P<proj>k|v)_proj\.(?:attn\.)?(?P<part>k|v)_scale",
    rf"{ATTENTION}(?P<part>k|v)_proj\.output_scale",
)
NAMES = [re.compile(each) for each in SPELLINGS]
OTHERS = re.compile(rf"{ATTENTION}(?:attn\.)?(?:(?:q|prob|prob_output)_scale|[kqv]_zero_point)")
"""Scales of queries and probabilities, which nothing here multiplies in 8 bits, and zeros of symmetric numbers."""


def place_of(name: str) -> tuple[int, str] | None:
    """The layer of which the tensor of that name is a scale, and of what: "k", "v" or "kv"; None: it is none."""
    for each in NAMES:
        if found := each.fullmatch(name):
            parts = found.groupdict()
            return None if parts.get("proj") not in (None, parts["part"]) else (int(parts["layer"]), parts["part"])
    return None


def without_kv_scales(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors that are no scales of what attention caches or multiplies."""
    return {name: entry for name, entry in entries.items() if place_of(name) is None and OTHERS.fullmatch(name) is None}


def stored_scales(entries: Mapping[str, TensorEntry], heads: Mapping[int, int]) -> LayerScales:
    """Those of a checkpoint, of the layers among `heads`, which have as many kv heads. Raises CheckpointError for some
    that no number may be multiplied with."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, entry in entries.items():
        if (place := place_of(name)) is None or place[0] not in heads:
            continue
        with mapped(entry, DTYPES) as stored:
            values = np.asarray(stored, np.float32).reshape(-1)
        where = f"{entry.path}: tensor {entry.name}"
        own = found.setdefault(place[0], {})
        for part in place[1]:
            scales = checked(values, heads[place[0]], where, CheckpointError)
            if part in own and place[1] != "kv" and (own[part] != scales).any():
                raise CheckpointError(f"{where} is another scale of what has one already. Take one of them out.")
            own[part] = own[part] if part in own and place[1] == "kv" else scales
    return {layer: pair_of(own) for layer, own in found.items()}


def pair_of(own: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Scales of keys and of values; 1 where one of them has none."""
    one = np.ones((), np.float32)
    return own.get("k", one), own.get("v", one)


def checked(values: np.ndarray, num_kv_heads: int, where: str, error: type[Exception]) -> np.ndarray:
    """One scale, or one for each head. Raises `error` for others, and for zeros, negative numbers, NaN and infinity."""
    if values.size not in (1, num_kv_heads):
        raise error(f"{where} has {values.size} scales; there must be 1, or one for each of {num_kv_heads} kv heads.")
    if not (np.isfinite(values).all() and (values > 0).all()):
        wrong = values[~(np.isfinite(values) & (values > 0))][0]
        raise error(f"{where} has the scale {wrong:g}; scales must be finite numbers above 0.")
    return values.reshape(()) if values.size == 1 else values


# ---- files of their own ------------------------------------------------------------------------------


def read_scales_file(path: Path, num_layers: int, heads: Mapping[int, int]) -> tuple[str, LayerScales]:
    """(the type that they are for, scales) of the layers among `heads`, which have as many kv heads. Raises ConfigError
    for a file that is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        said = content["kv_cache"]
        dtype, ranks = str(said.get("dtype", "float8_e4m3fn")), said["scaling_factor"]
        by_rank = [ranks[str(rank)] for rank in range(len(ranks))]
        if not by_rank or not by_rank[0] or any(rank.keys() != by_rank[0].keys() for rank in by_rank):
            raise ValueError("its ranks have different layers, or none")
        layers = {int(layer): [rank[layer] for rank in by_rank] for layer in by_rank[0]}
        pairs = {layer: [parts_of(each) for each in given] for layer, given in layers.items()}
    except OSError as error:
        raise ConfigError(f"cannot read kv_cache_scales {path}: {error.strerror}. Check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no scales of keys and values: {type(error).__name__}: {error}. `jaxpaged calibrate` writes "
            "such a file."
        ) from None
    if outside := sorted(layer for layer in layers if not 0 <= layer < num_layers):
        raise ConfigError(f"{path} has scales of layer {outside[0]}, but the model has {num_layers} layers.")
    found = {}
    for layer, given in pairs.items():
        where = f"{path}: layer {layer}"
        if layer in heads:
            k, v = (joined([each[which] for each in given], heads[layer], where) for which in range(2))
            found[layer] = k, v
    return dtype, found


def parts_of(given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scales of keys and values of one rank. Raises ValueError, TypeError or KeyError."""
    k, v = (given["k"], given["v"]) if isinstance(given, Mapping) else (given, given)
    return numbers_of(k), numbers_of(v)


def numbers_of(given: Any) -> np.ndarray:
    values = given if isinstance(given, list) else [given]
    if not values or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        raise ValueError(f"{given!r:.60} is no number, and no list of numbers")
    return np.array(values, np.float64).astype(np.float32)


def joined(of_ranks: list[np.ndarray], num_kv_heads: int, where: str) -> np.ndarray:
    """The scales of all heads, of which each rank has as many."""
    if len(of_ranks) == 1:
        return checked(of_ranks[0], num_kv_heads, where, ConfigError)
    if num_kv_heads % len(of_ranks):
        raise ConfigError(f"{where} has scales of {len(of_ranks)} ranks, which {num_kv_heads} kv heads do not fit.")
    each = num_kv_heads // len(of_ranks)
    parts = [np.broadcast_to(checked(part, each, where, ConfigError), each) for part in of_ranks]
    return np.concatenate(parts)


def scales_file(model_type: str, dtype: str, scales: LayerScales) -> str:
    """The content of such a file."""
    number = lambda values: [*map(float, values)] if values.ndim else float(values)
    layers = {str(layer): {"k": number(k), "v": number(v)} for layer, (k, v) in sorted(scales.items())}
    said = {"model_type": model_type, "kv_cache": {"dtype": dtype, "scaling_factor": {"0": layers}}}
    return json.dumps(said, indent=1) + "\n"


def rescaled(scales: LayerScales, largest_then: float, largest_now: float) -> LayerScales:
    """The same for numbers of another type, so that its largest one means what the other's did."""
    if math.isclose(largest_then, largest_now):
        return scales
    factor = np.float32(largest_then / largest_now)
    return {layer: (k * factor, v * factor) for layer, (k, v) in scales.items()}


# ---- what a checkpoint says of its cache -------------------------------------------------------------


def named_type(hf: Mapping[str, Any], folder: Path | None) -> str:
    """The `kv_cache_dtype` that a checkpoint was made for; empty where it says nothing of it."""
    said = hf.get("quantization_config")
    said = said if isinstance(said, Mapping) else {}
    if folder is not None and (folder / "hf_quant_config.json").exists():
        try:
            own = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))
            said = {**said, **own.get("quantization", {})}
        except (OSError, ValueError, TypeError, AttributeError):
            pass  # who reads weights by it says what is wrong with it
    algorithm = said.get("kv_cache_quant_algo")
    if isinstance(algorithm, str) and algorithm.upper() == "FP8":
        return "fp8_e4m3"
    scheme = said.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8 or scheme.get("type") not in ("float", "int"):
        return ""
    is_float, is_dynamic = scheme["type"] == "float", scheme.get("dynamic") is True
    return ("fp8" if is_float else "int8") + "_per_token_head" if is_dynamic else ("fp8_e4m3" if is_float else "int8")
