#!/usr/bin/env python3
"""Record what other people's code makes of quantised weights, into tests/golden/formats/.

    scripts/update_format_goldens.py [--env FOLDER]

Each case is packed by the library that writes the format and decoded by it, or by the one that defined it: AutoGPTQ,
AutoAWQ, compressed-tensors, transformers. The suite compares bit for bit and needs none of them. This script makes an
environment of its own beside that of update_golden.py, whose torch and transformers it uses, and runs itself there.
Files hold, of a case NAME, tensors `NAME/...` as a checkpoint has them and `NAME/weight_out`, what they mean.
"""

import argparse
import importlib
import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

from update_golden import DEFAULT_ENV, environment

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "formats"
OWN_ENV = DEFAULT_ENV.with_name("format-golden-env")
PACKAGES = [
    "compressed-tensors==0.20.0",
    "gguf==0.19.0",
    "loguru",
    "psutil",
    "accelerate",
    "ml_dtypes",
    "sentencepiece",
    "protobuf",
    "xllamacpp==2026.10.11549",
]
WHOLE_PACKAGES = ["mistral-common==1.13.1"]
"""With what they need."""
SOURCES = ["auto-gptq==0.7.1", "autoawq==0.2.7"]
"""Of these only single files are imported: the packages themselves want CUDA and an old torch."""
FOR_SOURCES = "--python-version 3.11 --platform manylinux_2_17_x86_64 --only-binary :all: --no-deps".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=OWN_ENV, help="environment with the libraries; made when missing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        record_all(arguments.env)
        return
    python = own_environment(arguments.env)
    sys.exit(subprocess.run([python, __file__, "--inside", "--env", arguments.env]).returncode)


def own_environment(folder: Path) -> Path:
    """The Python of an environment with the libraries; made when there is none."""
    python = folder / "bin" / "python"
    if not (folder / "sources").exists():
        of_torch = environment(DEFAULT_ENV)
        subprocess.run([of_torch, "-m", "venv", folder], check=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        theirs, ours = (subprocess.check_output([exe, "-c", ask], text=True).strip() for exe in (of_torch, python))
        (Path(ours) / "torch.pth").write_text(theirs + "\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *WHOLE_PACKAGES], check=True)
        wheels = folder / "wheels"
        subprocess.run([python, "-m", "pip", "download", "-q", "-d", wheels, *FOR_SOURCES, *SOURCES], check=True)
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder / "sources")
    return python


def record_all(env: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    import_sources(env / "sources")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    cases = [*gptq_cases(), *awq_cases(), *compressed_cases(), *transformers_cases()]
    tensors, arguments = {}, {}
    for name, given, own, weight_out in cases:
        arguments[name] = given
        tensors.update({f"{name}/{key}": tensor.contiguous().clone() for key, tensor in own.items()})
        tensors[f"{name}/weight_out"] = weight_out.contiguous().clone()
    save_file(tensors, GOLDEN / "weights.safetensors")
    (GOLDEN / "weights.json").write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {(GOLDEN / 'weights.safetensors').stat().st_size} bytes")


def import_sources(folder: Path) -> None:
    """Make single files importable whose packages cannot be imported as a whole."""
    for name in (
        "auto_gptq",
        "auto_gptq.nn_modules",
        "auto_gptq.nn_modules.qlinear",
        "awq",
        "awq.modules",
        "awq.modules.linear",
        "awq.utils",
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module


Case = tuple[str, dict[str, Any], dict[str, Any], Any]
"""(name, arguments of the decoder, tensors of the file, the weight [outputs, inputs])."""


def gptq_cases() -> list[Case]:
    import torch

    QuantLinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    cases = []
    for bits, group, is_symmetric, order in (
        (4, 32, True, "plain"),
        (4, 32, False, "plain"),
        (4, 64, False, "shuffled"),
        (4, -1, False, "plain"),
        (8, 32, False, "sorted"),
        (8, 32, True, "plain"),
        (8, 64, False, "shuffled"),
    ):
        outputs, inputs = 32, 128
        groups = 1 if group == -1 else inputs // group
        linear = torch.nn.Linear(inputs, outputs, bias=False).half()
        layer = QuantLinear(bits, group, inputs, outputs, bias=False)
        g_idx = torch.arange(inputs, dtype=torch.int32) // (inputs // groups)
        if order == "shuffled":
            g_idx = g_idx[torch.randperm(inputs)]
        half = 2 ** (bits - 1)
        zeros = torch.full((outputs, groups), half) if is_symmetric else torch.randint(1, 2 * half, (outputs, groups))
        scales = ((torch.rand(outputs, groups) + 0.5) * 0.2 / 2**bits).half()
        span = torch.arange(inputs) % (2 * half)  # weights that use every number
        numbers = span[torch.stack([torch.randperm(inputs) for _ in range(outputs)])]
        own = g_idx.long()
        linear.weight.data = ((numbers - zeros[:, own]) * scales[:, own].float()).half()
        layer.pack(linear, scales.float(), zeros.float(), g_idx)
        tensors = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        layer.scales = layer.scales.float()
        weight_out = layer(torch.eye(inputs)).T
        given = {"format": "gptq", "bits": bits, "is_symmetric": is_symmetric, "is_v2": False}
        name = f"gptq{bits}_{'sym' if is_symmetric else 'asym'}_g{group}_{order}"
        cases.append((name, given, tensors, weight_out))
        if not is_symmetric and order == "shuffled":  # version 2 stores the zeros themselves
            packed = pack_along_columns(zeros.T, bits)
            cases.append((f"{name}_v2", given | {"is_v2": True}, {**tensors, "qzeros": packed}, weight_out))
    return cases


def pack_along_columns(numbers: Any, bits: int) -> Any:
    """int32 words of whole numbers, lowest bits first, as `QuantLinear.pack` has them."""
    import numpy as np
    import torch

    fields = numbers.numpy().astype(np.uint32).reshape(len(numbers), -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return torch.from_numpy(np.bitwise_or.reduce(fields << shifts, axis=-1).astype(np.uint32).view(np.int32))


def awq_cases() -> list[Case]:
    import torch

    linear_class = importlib.import_module("awq.modules.linear.gemm").WQLinear_GEMM
    dequantize = importlib.import_module("awq.utils.packing_utils").dequantize_gemm
    cases = []
    for group in (32, 128):
        outputs, inputs = 64, 128
        linear = torch.nn.Linear(inputs, outputs, bias=False).half()
        zeros = torch.randint(0, 16, (inputs // group, outputs))
        scales = (torch.rand(inputs // group, outputs) + 0.5) * 0.01
        numbers = torch.randint(0, 16, (outputs, inputs))
        own = torch.arange(inputs) // group
        linear.weight.data = ((numbers - zeros[own].T) * scales[own].T).half()
        layer = linear_class.from_linear(linear, 4, group, scales=scales, zeros=zeros)
        tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        weight_out = dequantize(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).T
        cases.append((f"awq_g{group}", {"format": "awq"}, tensors, weight_out))
    return cases


def compressed_case(name: str, kind: str, given: dict[str, Any], shape: tuple[int, int], **args: Any) -> Case:
    """`kind`: the compressor. `given`: further arguments of the decoder. `args`: of compressed-tensors' weights."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    weight = torch.randn(shape) * 0.02 + (0 if weights.symmetric else 0.005)
    rows, columns = shape
    block = weights.block_structure
    group = weights.group_size if (weights.group_size or 0) > 0 else columns
    grouped = weight.reshape(rows, columns // group, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if weights.strategy == "tensor":
        low, high = low.min().reshape(1), high.max().reshape(1)
    if block:
        tiles = [list(band.split(block[1], 1)) for band in weight.split(block[0])]
        low = torch.tensor([[float(tile.min()) for tile in band] for band in tiles])
        high = torch.tensor([[float(tile.max()) for tile in band] for band in tiles])
    whole = generate_gparam(weight.amin(), weight.amax()).reshape(1) if kind == "nvfp4-pack-quantized" else None
    scale, zero = calculate_qparams(low, high, weights, global_scale=whole)
    scale = scale if whole is not None else scale.to(torch.bfloat16 if "mxfp4" not in kind else torch.float32)
    state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale}
    if not weights.symmetric:
        state["weight_zero_point"] = zero
    if whole is not None:
        state["weight_global_scale"] = whole
    compressor = BaseCompressor.get_value_from_registry(kind)
    tensors = compressor.compress(state, scheme)
    weight_out = compressor.decompress(tensors, scheme)["weight"]
    return name, {"format": kind, **given}, tensors, weight_out


def compressed_cases() -> list[Case]:
    import torch

    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    eight, float8 = {"num_bits": 8, "symmetric": True}, {"num_bits": 8, "type": "float", "symmetric": True}
    float4 = {"num_bits": 4, "type": "float", "symmetric": True}
    blocks = {"strategy": "block", "block_structure": [16, 32]}
    nvfp4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    mxfp4 = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
    case, shape = compressed_case, (24, 64)
    return [
        case("ct4_sym", "pack-quantized", {"bits": 4}, (24, 96), symmetric=True, **four),
        case("ct4_asym", "pack-quantized", {"bits": 4}, (20, 96), symmetric=False, **four),
        case("ct4_channel", "pack-quantized", {"bits": 4}, (24, 60), symmetric=True, num_bits=4, strategy="channel"),
        case("ct8_asym", "pack-quantized", {"bits": 8}, shape, symmetric=False, **four | {"num_bits": 8}),
        case("ct_int8", "int-quantized", {}, shape, **eight, strategy="channel"),
        case("ct_int8_tensor", "int-quantized", {}, shape, **eight, strategy="tensor"),
        case("ct_fp8", "float-quantized", {}, shape, **float8, strategy="channel"),
        case("ct_fp8_tensor", "float-quantized", {}, shape, **float8, strategy="tensor"),
        case("ct_fp8_block", "float-quantized", {"block": [16, 32]}, (40, 80), **float8, **blocks),
        case("ct_nvfp4", "nvfp4-pack-quantized", {"is_divisor": True}, shape, **float4, **nvfp4),
        case("ct_mxfp4", "mxfp4-pack-quantized", {}, shape, **float4, **mxfp4),
    ]


def transformers_cases() -> list[Case]:
    import torch
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    cases = []
    for name, shape, block in (("fp8_block", (40, 80), (16, 32)), ("fp8_block_e8m0", (36, 64), (16, 32))):
        weight = torch.randn(shape).clamp(-3, 3).mul(100).to(torch.float8_e4m3fn)
        scale = (torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1])) + 0.5) * 1e-3
        if name.endswith("e8m0"):
            scale = scale.to(torch.float8_e8m0fnu)
        weight_out = _dequantize_fp8_weight(weight, scale.float(), list(block), torch.float32)
        tensors = {"weight": weight, "weight_scale_inv": scale}
        cases.append((name, {"format": "fp8", "block": block}, tensors, weight_out))
    blocks = torch.randint(0, 256, (2, 24, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, 24, 2), dtype=torch.uint8)
    weight_out = convert_moe_packed_tensors(blocks, scales).swapaxes(1, 2)
    for expert in range(2):
        tensors = {"blocks": blocks[expert], "scales": scales[expert]}
        cases.append((f"gpt_oss_expert{expert}", {"format": "mxfp4"}, tensors, weight_out[expert]))
    return cases


if __name__ == "__main__":
    main()
