"""A 16-bit model as a quantised checkpoint that other engines load too: safetensors in compressed-tensors' formats.

    FP8_DYNAMIC  float8_e4m3fn, one scale for an output; activations are rounded for each token as they come
    W8A8         int8, likewise
    W4A16        4 bits in groups of 128 inputs, where a matrix has such groups; activations stay in 16 bits

Weights are rounded to nearest, without calibration, file by file. What is no weight of a linear layer stays as it is:
embeddings, heads, routers, norms, towers. Names and files are those of the model. The formats are what `schemes` reads.

Letters: O outputs and I inputs of a matrix.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.params.derived_folder import write_derived
from jaxpaged.params.encoded import WEIGHT, holds_weights, kind_of
from jaxpaged.params.quantized import BLOCK, LARGEST, LARGEST_FLOAT8, OF_TOWERS, float_blocks
from jaxpaged.params.safetensors_reader import ALL_DTYPES, DTYPES, TensorEntry, mapped
from jaxpaged.params.safetensors_writer import safetensors_of
from jaxpaged.params.schemes.fp8 import Float8
from jaxpaged.params.schemes.scheme import LINEAR, Scheme
from jaxpaged.params.spec import Spec

Tensors = dict[str, np.ndarray]
"""Name behind that of a module -> tensor."""

MakeTensors = Callable[[np.ndarray, np.dtype], Tensors | None]
"""A matrix [O, I] in float32, a type of scales -> what is stored of it; None: it stays as it is."""

GROUP = 128
"""Inputs that share a scale in 4 bits."""


@dataclass(frozen=True)
class Rounding:
    """One way to round. `description`: a group of modules in config.json, and `format` what it is called there."""

    tensors: MakeTensors
    description: Mapping[str, Any]
    format: str


def write_rounded(
    specs: Any,
    config: Any,
    folder: Path,
    out_folder: Path,
    scheme: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model of `folder`, rounded by one of `ROUNDINGS`, to a new folder.

    Raises UsageError for a model that is quantised already, and when `out_folder` holds something or cannot be made;
    CheckpointError for files that are damaged.
    """
    if config.quantization is not None:
        raise UsageError(f"{folder} is quantised already. Name the 16-bit model that it was made of.")
    rounding, sizes = ROUNDINGS[scheme], config.dim_sizes()
    linears = {name for spec in jax.tree.leaves(specs) if is_linear(spec) for name in spec.tensor_names(sizes)}
    left: list[str] = []  # modules that stay as they are

    def write_file(path: Path, entries: Mapping[str, TensorEntry]) -> Iterable[str]:
        stored: Tensors = {}
        for name, entry in entries.items():
            rounded = rounded_entry(entry, rounding.tensors) if name in linears else None
            if rounded is None:
                stored[entry.name] = copied(entry)
                left.extend([entry.name.removesuffix(f".{WEIGHT}")] if len(entry.shape) == 2 else [])
            else:
                module = entry.name.removesuffix(WEIGHT)
                stored |= {module + end: tensor for end, tensor in rounded.items()}
        with path.open("wb") as file:
            file.writelines(safetensors_of(stored))
        return stored

    with_rounding = lambda hf: {**hf, "quantization_config": description(rounding, left)}
    write_derived(folder, out_folder, write_file, with_rounding, progress)


def is_linear(spec: Spec) -> bool:
    """Whether a parameter is the weight of a linear layer, to what reads such files, and not one of a tower."""
    return holds_weights(spec) and kind_of(spec) == LINEAR and not OF_TOWERS & set(spec.dims)


def rounded_entry(entry: TensorEntry, tensors_of: MakeTensors) -> Tensors | None:
    """What is stored of a weight in a file; None where it stays as it is."""
    if len(entry.shape) != 2:
        return None
    with mapped(entry, DTYPES) as weight:
        return tensors_of(weight.astype(np.float32), weight.dtype)


def copied(entry: TensorEntry) -> np.ndarray:
    with mapped(entry, ALL_DTYPES) as tensor:
        return np.array(tensor)


def description(rounding: Rounding, left: list[str]) -> dict[str, Any]:
    """`quantization_config`, in which modules that stay as they are have their names."""
    return {
        "quant_method": "compressed-tensors",
        "format": rounding.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **rounding.description}},
        "ignore": sorted(left),
    }


# ---- ways to round -------------------------------------------------------------------------------


def scales_of(tops: np.ndarray, largest: float, dtype: np.dtype) -> np.ndarray:
    """Scales, as `dtype` has them, with which `tops` become `largest`; 1 for zeros."""
    return np.where(tops > 0, tops / np.float32(largest), np.float32(1)).astype(dtype)


def rows(values: np.dtype, largest: float, weight_OI: np.ndarray, dtype: np.dtype) -> Tensors:
    """8 bits with a scale for every output."""
    scale_O1 = scales_of(np.abs(weight_OI).max(axis=1, keepdims=True), largest, dtype)
    steps_OI = np.clip(weight_OI / scale_O1.astype(np.float32), -largest, largest)
    return {
        "weight": (np.rint(steps_OI) if values == np.int8 else steps_OI).astype(values),
        "weight_scale": scale_O1,
    }


def blocks(weight_OI: np.ndarray, dtype: np.dtype) -> Tensors:
    """8-bit floats with a float32 scale for every block of outputs and inputs; the last ones may be smaller."""
    inputs = weight_OI.shape[1]
    values_OI, scales_OC = float_blocks(np.pad(weight_OI, ((0, 0), (0, -inputs % BLOCK))))
    return {"weight": values_OI[:, :inputs], "weight_scale": scales_OC[::BLOCK]}


def packed_groups(weight_OI: np.ndarray, dtype: np.dtype) -> Tensors | None:
    """4 bits with a scale for every group of inputs, eight values in a word, the first in the lowest bits."""
    outputs, inputs = weight_OI.shape
    if inputs % GROUP:
        return None
    groups_OCI = weight_OI.reshape(outputs, -1, GROUP)
    scale_OC = scales_of(np.abs(groups_OCI).max(axis=-1), 7.5, dtype)
    steps_OCI = np.rint(groups_OCI / scale_OC.astype(np.float32)[..., None])
    codes = (np.clip(steps_OCI, -8, 7) + 8).astype(np.uint32).reshape(outputs, -1, 8)
    words = (codes << (4 * np.arange(8, dtype=np.uint32))).sum(axis=-1, dtype=np.uint32)
    return {
        "weight_packed": words.view(np.int32),
        "weight_scale": scale_OC,
        "weight_shape": np.array(weight_OI.shape, np.int64),
    }


def of_tokens(kind: str) -> dict[str, Any]:
    """How activations are rounded: with a scale for each token, found as it comes."""
    return {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}


def of_outputs(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "channel", "dynamic": False, "symmetric": True}


E4M3, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
IN_4_BITS = {**of_outputs("int"), "num_bits": 4, "strategy": "group", "group_size": GROUP}
ROUNDINGS = {
    "FP8_DYNAMIC": Rounding(
        lambda weight_OI, dtype: rows(E4M3, LARGEST_FLOAT8[E4M3.name], weight_OI, dtype),
        {"weights": of_outputs("float"), "input_activations": of_tokens("float")},
        "float-quantized",
    ),
    "W8A8": Rounding(
        lambda weight_OI, dtype: rows(INT8, LARGEST, weight_OI, dtype),
        {"weights": of_outputs("int"), "input_activations": of_tokens("int")},
        "int-quantized",
    ),
    "W4A16": Rounding(packed_groups, {"weights": IN_4_BITS, "input_activations": None}, "pack-quantized"),
}
"""Name that llm-compressor gives a way to round -> the way."""
UNDER_WAY: Mapping[Scheme, MakeTensors] = {
    Float8(): ROUNDINGS["FP8_DYNAMIC"].tensors,
    Float8((BLOCK, BLOCK)): blocks,
}
"""Scheme of an engine's checkpoint -> what rounds the weights to it that come in 16 bits."""
