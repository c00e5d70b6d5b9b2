"""A 16-bit model as a quantised checkpoint that other engines load too: safetensors in compressed-tensors' formats.

    FP8_DYNAMIC  float8_e4m3fn, one scale for an output; activations are rounded for each token as they come
    W8A8         int8, likewise
    W4A16        4 bits in groups of 128 inputs, where a matrix has such groups; activations stay in 16 bits

Weights are rounded to nearest, without calibration, file by file. What is no weight of a linear layer stays as it is:
embeddings, heads, routers, norms, towers. Names and files are those of the model. The formats are what `schemes` reads.

Letters: O outputs and I inputs of a matrix.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxpaged.errors import UsageError
from jaxpaged.params.checkpoint import INDEX, canonical_name, every_entry
from jaxpaged.params.orbax_format import SIDE_FILES, make_folder
from jaxpaged.params.quantized import OF_TOWERS, is_matrix
from jaxpaged.params.safetensors_reader import BYTE_DTYPES, DTYPES, EIGHT_BITS, WHOLE_DTYPES, TensorEntry, mapped

Tensors = dict[str, np.ndarray]
"""Name behind that of a module -> tensor."""

GROUP = 128
"""Inputs that share a scale in 4 bits."""
DTYPES_OF_FILES = {**DTYPES, **WHOLE_DTYPES, **BYTE_DTYPES, **EIGHT_BITS}
NAMES = {dtype: name for name, dtype in DTYPES_OF_FILES.items()}


@dataclass(frozen=True)
class Rounding:
    """One way to round. `tensors` makes what is stored of a matrix [O, I] in float32, with scales of a type; None: it
    does not take the matrix. `description`: a group of modules in config.json, and `format` what it is called there."""

    tensors: Callable[[np.ndarray, np.dtype], Tensors | None]
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
    rounding, entries = ROUNDINGS[scheme], every_entry(folder)
    linears = {name for spec in jax.tree.leaves(specs) if is_linear(spec) for name in weight_names(spec, config)}
    make_folder(out_folder)
    files: dict[Path, list[TensorEntry]] = {}
    for entry in entries.values():
        files.setdefault(entry.path, []).append(entry)
    index: dict[str, str] = {}
    left: list[str] = []
    done, total = 0, sum(path.stat().st_size for path in files)
    for path, own in files.items():
        stored: Tensors = {}
        for entry in own:
            rounded = rounded_entry(entry, rounding) if canonical_name(entry.name) in linears else None
            if rounded is None:
                stored[entry.name] = copied(entry)
                left += [entry.name.removesuffix(".weight")] if len(entry.shape) == 2 else []
            else:
                module = entry.name.removesuffix("weight")
                stored |= {module + name: tensor for name, tensor in rounded.items()}
        save(stored, out_folder / path.name)
        index |= dict.fromkeys(stored, path.name)
        progress(done := done + path.stat().st_size, total)
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n"
        (out_folder / INDEX).write_text(text, encoding="utf-8")
    copy_side_files(folder, out_folder, description(rounding, left))


def is_linear(spec: Any) -> bool:
    """Whether a parameter is the weight of a linear layer, which engines store in few bits: no table, no router."""
    return is_matrix(spec) and spec.dtype is None and not {*"VXY", *OF_TOWERS} & set(spec.dims)


def weight_names(spec: Any, config: Any) -> list[str]:
    return [name for name in spec.tensor_names(config.dim_sizes()) if name.endswith(".weight")]


def rounded_entry(entry: TensorEntry, rounding: Rounding) -> Tensors | None:
    """What is stored of a weight in a file; None where it stays as it is."""
    if len(entry.shape) != 2:
        return None
    with mapped(entry, DTYPES) as weight:
        return rounding.tensors(weight.astype(np.float32), weight.dtype)


def copied(entry: TensorEntry) -> np.ndarray:
    with mapped(entry, DTYPES_OF_FILES) as tensor:
        return np.array(tensor)


def save(tensors: Tensors, path: Path) -> None:
    """Write one safetensors file: the length of a header, the header, and the tensors one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).view(np.uint8).reshape(-1))


def description(rounding: Rounding, left: list[str]) -> dict[str, Any]:
    """`quantization_config`, in which modules that stay as they are have their names."""
    return {
        "quant_method": "compressed-tensors",
        "format": rounding.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], **rounding.description}},
        "ignore": sorted(left),
    }


def copy_side_files(folder: Path, out_folder: Path, quantization_config: Mapping[str, Any]) -> None:
    """Tokenizer and settings as they are, and config.json with the description."""
    for path in (path for pattern in SIDE_FILES for path in folder.glob(pattern)):
        if path.name not in (INDEX, "config.json"):
            shutil.copyfile(path, out_folder / path.name)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**hf, "quantization_config": quantization_config}, indent=2) + "\n"
    (out_folder / "config.json").write_text(text, encoding="utf-8")


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


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
IN_4_BITS = {**of_outputs("int"), "num_bits": 4, "strategy": "group", "group_size": GROUP}
ROUNDINGS = {
    "FP8_DYNAMIC": Rounding(
        lambda weight_OI, dtype: rows(E4M3, 448.0, weight_OI, dtype),
        {"weights": of_outputs("float"), "input_activations": of_tokens("float")},
        "float-quantized",
    ),
    "W8A8": Rounding(
        lambda weight_OI, dtype: rows(np.dtype(np.int8), 127.0, weight_OI, dtype),
        {"weights": of_outputs("int"), "input_activations": of_tokens("int")},
        "int-quantized",
    ),
    "W4A16": Rounding(
        packed_groups, {"weights": {**IN_4_BITS, "symmetric": True}, "input_activations": None}, "pack-quantized"
    ),
}
"""Name that llm-compressor gives a way to round -> the way."""
