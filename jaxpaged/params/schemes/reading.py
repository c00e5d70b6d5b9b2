"""What config.json, or a file beside it, says of how weights were quantised -> a `Quantization`, or why it is not read.

Knows the names of methods that people meet on hubs, and no model.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params.other_formats import quantised
from jaxpaged.params.schemes import awq, compressed_tensors, floats4, fp8, gguf, gptq, modelopt
from jaxpaged.params.schemes.fields import Fields, short
from jaxpaged.params.schemes.scheme import Quantization

READERS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": fp8.read,
    "mxfp4": floats4.read,
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
    "gguf": gguf.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
}
"""`quant_method` -> what reads it."""
METHODS = {
    "bitsandbytes": "bitsandbytes",
    "fbgemm_fp8": "FBGEMM FP8",
    "hqq": "HQQ",
    "aqlm": "AQLM",
    "quanto": "Quanto",
    "torchao": "torchao",
    "eetq": "EETQ",
    "auto-round": "AutoRound",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "bitnet": "BitNet",
    "vptq": "VPTQ",
    "higgs": "HIGGS",
    "spqr": "SpQR",
    "quark": "Quark",
}
"""`quant_method` of what is not read -> what its makers call it."""
FIELDS = ("quantization_config", "compression_config", "quantization")
"""Of config.json, any of which may say it."""
BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where quantisation is described beside config.json -> what is meant unless the file says so."""
SOURCE = "jaxpaged_source"
"""The field in which `with_description_beside` notes from which file a description comes."""


def with_description_beside(folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with the description of a file beside it, where it has none itself. Raises CheckpointError."""
    if any(hf.get(name) for name in FIELDS):
        return hf
    for name, method in BESIDE.items():
        if not (folder / name).exists():
            continue
        try:
            given = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / name} cannot be read as JSON: {error}. Download it again.") from error
        if not isinstance(given, dict):
            raise CheckpointError(f"{folder / name} holds no JSON object. Download it again.")
        return {**hf, FIELDS[0]: {"quant_method": method, **given, SOURCE: name}}
    return hf


def rounding_of(method: str | None, quantization: Quantization | None) -> str | None:
    """How weights are to be rounded when they are loaded, of what `--quantization` says: the name of a format says
    nothing but that a checkpoint has it. Raises ConfigError where the two contradict each other."""
    if method is None or (quantization is None and method not in OF_CHECKPOINTS):
        return method
    if quantization is None:
        raise ConfigError(
            f"quantization is {method!r}, a format of checkpoints, but config.json says nothing of quantisation. Name "
            "a checkpoint that has it, or give 'int8', 'int4' or 'fp8_per_channel', which round the weights of this "
            "one when they are loaded."
        )
    if quantization.method.lower().split(" ")[0] == method:
        return None
    if method in AGAIN:
        return method
    raise ConfigError(
        f"quantization is {method!r}, but {quantization.source} says that the weights are stored in "
        f"{quantization.method}. Leave quantization out; quantized_form says what they become on the devices."
    )


OF_CHECKPOINTS = ("gptq", "awq", "compressed-tensors", "modelopt", "mxfp4", "gguf")
"""What `--quantization` may say that is the name of a format. So may fp8, which also rounds other models."""
AGAIN = ("int8", "int4")
"""What weights of any checkpoint can be rounded to."""


def is_described(hf: Mapping[str, Any]) -> bool:
    """Whether config.json, or the part of it that is of a language model, says anything of quantised weights."""
    inner = hf.get("text_config")
    return any(part.get(name) for part in (hf, inner) if isinstance(part, dict) for name in FIELDS)


def without_description(hf: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the same model once its weights are decoded."""
    left = {name: value for name, value in hf.items() if name not in FIELDS}
    inner = left.get("text_config")
    return {**left, "text_config": without_description(inner)} if isinstance(inner, dict) else left


def quantization_of(given: Any, place: str = FIELDS[0]) -> Quantization | None:
    """What a description says; None where there is none. `place` is the field of config.json that it is.

    CheckpointError for what is not read, saying what would serve.
    """
    if not isinstance(given, dict | None):
        raise CheckpointError(f"config.json: {place} is {short(given)}; it must be an object.")
    if not given:
        return None
    source = given.get(SOURCE, "config.json")
    given = {name: value for name, value in given.items() if name != SOURCE}
    method = str(given.get("quant_method")).lower().replace("_", "-")
    if method in ("auto-round", "intel/auto-round") and "gptq" in str(given.get("packing_format")):
        method, given = "gptq", {name: value for name, value in given.items() if name != "packing_format"}
    read = READERS.get(method) or READERS.get(method.replace("-", "_"))
    if read is None:
        raise quantisation_error(given, source)
    return read(Fields(given, source, place if source == "config.json" else "its fields"))


def quantisation_error(given: Mapping[str, Any], file: str = "config.json") -> CheckpointError:
    """The error for a description of a kind that is not read."""
    method, bits = given.get("quant_method"), bits_of(given)
    name = METHODS.get(str(method)) or METHODS.get(str(method).replace("_", "-"))
    if name is None:
        name = "MLX" if method is None and "group_size" in given else str(method or "an unnamed method")[:40]
    how = f"with {name}" + (f" to {bits} bits" if bits else "")
    return quantised(f"{file} says that the weights were quantised {how}", bits)


def bits_of(given: Mapping[str, Any]) -> int | None:
    """How many bits a weight has, as far as the description says so."""
    told = [given.get("bits"), given.get("w_bit")]
    told += [size for size in (4, 8) if given.get(f"load_in_{size}bit") is True]
    told += [8 for name in ("quant_method", "quant_type") if "fp8" in str(given.get(name, ""))]
    return next((bits for bits in told if type(bits) is int and 0 < bits < 16), None)
