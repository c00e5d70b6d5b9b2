"""Tiny checkpoints in every format that is read, written beside the same weights in float32.

The packers are written down here from the formats' descriptions, number by number, and not taken from decoders, which
they test. Letters: O outputs, I inputs, C groups.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxpaged.params.safetensors_reader import STORED_DTYPES, mapped, read_header
from tests.models.checkpoints import LLAMA, LLAMA4, MIXTRAL, PHI3, QWEN2_MOE, random_tensors
from tests.models.tensor_shapes import tensor_shapes

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "llama": {**LLAMA, **SMALL},
    "phi3": {**PHI3, **SMALL},
    "mixtral": {**MIXTRAL, **SMALL, "num_local_experts": 4, "intermediate_size": 64},
    "qwen2_moe": {
        **QWEN2_MOE,
        **SMALL,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_experts": 4,
    },
    "llama4": {**LLAMA4, **SMALL, "intermediate_size": 64, "intermediate_size_mlp": 96, "num_local_experts": 3},
}
GROUP = 16
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which output of eight lies in which field of a word."""

Tensors = dict[str, np.ndarray]


def by_group(weight_OI: np.ndarray, group: int) -> np.ndarray:
    return weight_OI.reshape(len(weight_OI), -1, group)


def whole_numbers(weight_OI: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """(values [O, I] from 0, scales [O, C] that float16 has, zeros [O, C], the weight that they are)."""
    groups = by_group(weight_OI, group)
    most = 2**bits - 1
    if symmetric:
        scales, zeros = np.abs(groups).max(2) / (most // 2), np.full(groups.shape[:2], (most + 1) // 2)
    else:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scales = (high - low) / most
        zeros = np.clip(np.rint(-low / scales), 1, most)
    scales = scales.astype(np.float16).astype(np.float32)
    values = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, most)
    exact = (values - zeros[..., None]).astype(np.float32) * scales[..., None]
    return (
        values.reshape(weight_OI.shape).astype(np.int64),
        scales,
        zeros.astype(np.int64),
        exact.reshape(weight_OI.shape),
    )


def words_of(fields: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., words] of fields [..., n], the first one in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -fields.shape[-1] % per_word)])
    parts = padded.reshape(*padded.shape[:-1], -1, per_word).astype(np.uint64)
    whole = sum(parts[..., i] << np.uint64(i * bits) for i in range(per_word))
    return (whole & np.uint64(2**32 - 1)).astype(np.uint32).view(np.int32)


def gptq(weight_OI, bits=4, group=GROUP, symmetric=False, v2=False, shuffled=False) -> tuple[Tensors, np.ndarray]:
    inputs = weight_OI.shape[1]
    group = group or inputs
    order = np.random.default_rng(inputs).permutation(inputs) if shuffled else np.arange(inputs)
    values, scales, zeros, exact = whole_numbers(weight_OI[:, order], bits, group, symmetric)
    back = np.argsort(order)
    tensors = {
        "qweight": words_of(values[:, back], bits).T.copy(),
        "qzeros": words_of((zeros.T - (not v2)), bits),
        "scales": scales.T.astype(np.float16),
        "g_idx": (back // group).astype(np.int32),
    }
    return tensors, exact[:, back]


def awq(weight_OI, group=GROUP) -> tuple[Tensors, np.ndarray]:
    values, scales, zeros, exact = whole_numbers(weight_OI, 4, group, False)
    taking_turns = lambda x_XO: x_XO.reshape(len(x_XO), -1, 8)[:, :, AWQ_ORDER].reshape(x_XO.shape)
    tensors = {
        "qweight": words_of(taking_turns(values.T), 4),
        "qzeros": words_of(taking_turns(zeros.T), 4),
        "scales": scales.T.astype(np.float16),
    }
    return tensors, exact


def packed(weight_OI, bits=4, group=GROUP, symmetric=True) -> tuple[Tensors, np.ndarray]:
    """compressed-tensors' W4A16 and W8A16."""
    group = group or weight_OI.shape[1]
    values, scales, zeros, exact = whole_numbers(weight_OI, bits, group, symmetric)
    tensors = {
        "weight_packed": words_of(values, bits),
        "weight_scale": scales,
        "weight_shape": np.array(weight_OI.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros.T, bits).T.copy()
    return tensors, exact


def integers(weight_OI) -> tuple[Tensors, np.ndarray]:
    scales = (np.abs(weight_OI).max(1, keepdims=True) / 127).astype(ml_dtypes.bfloat16)
    values = np.clip(np.rint(weight_OI / scales.astype(np.float32)), -127, 127).astype(np.int8)
    return {"weight": values, "weight_scale": scales}, values * scales.astype(np.float32)


def float8(weight_OI, scale="channel", name="weight_scale", block=(24, 40), dtype=np.float32, extra=()):
    """One scale for all, for each output, or for each block, the last ones of which are smaller."""
    axes = {"tensor": None, "channel": 1}
    if scale == "block":
        shape = [-(-size // edge) for size, edge in zip(weight_OI.shape, block, strict=True)]
        scales = np.zeros(shape, np.float32)
        for i, j in np.ndindex(*shape):
            here = weight_OI[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(here).max() / 448
        if dtype != np.float32:
            scales = 2.0 ** np.ceil(np.log2(scales))
        spread = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[: len(weight_OI), : weight_OI.shape[1]]
    else:
        spread = scales = np.abs(weight_OI).max(axes[scale], keepdims=scale == "channel") / np.float32(448)
    spread = np.asarray(spread, np.float32)
    values = (weight_OI / spread).astype(E4M3)
    tensors = {"weight": values, name: np.asarray(scales).astype(dtype)}
    return tensors | {end: np.ones((), np.float32) for end in extra}, values.astype(np.float32) * spread


def codes_of(steps: np.ndarray) -> np.ndarray:
    """The codes of the nearest numbers in E2M1."""
    code = np.abs(np.abs(steps)[..., None] - np.array(E2M1)).argmin(-1)
    return code + 8 * (steps < 0)


def float4(weight_OI, kind="mxfp4", modelopt=False) -> tuple[Tensors, np.ndarray]:
    groups = by_group(weight_OI, 32 if kind == "mxfp4" else 16)
    top = np.abs(groups).max(2)
    if kind == "mxfp4":
        exponents = np.ceil(np.log2(top / 6)).astype(np.int64)
        scales, stored = 2.0**exponents, {"weight_scale": (exponents + 127).astype(np.uint8)}
    else:
        whole = np.float32(top.max() / 6 / 448)
        of_group = (top / 6 / whole).astype(E4M3)
        scales = of_group.astype(np.float32) * whole if modelopt else of_group.astype(np.float32) / (1 / whole)
        given = {"weight_scale_2": whole} if modelopt else {"weight_global_scale": (1 / whole).reshape(1)}
        stored = {"weight_scale": of_group, **{name: np.asarray(x, np.float32) for name, x in given.items()}}
    codes = codes_of(groups / scales[..., None])
    numbers = np.array(E2M1)[codes & 7] * np.where(codes > 7, -1, 1)
    exact = (numbers * scales[..., None].astype(np.float32)).astype(np.float32)
    flat = codes.reshape(weight_OI.shape).astype(np.uint8)
    bytes_OB = flat[:, ::2] | flat[:, 1::2] << 4
    return {"weight" if modelopt else "weight_packed": bytes_OB, **stored}, exact.reshape(weight_OI.shape)


def ct(weights: dict[str, Any], form: str, **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    ignore = ["lm_head", "re:.*block_sparse_moe.gate$", "re:.*router", "re:.*mlp.(gate|shared_expert_gate)$"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ignore, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
F8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INV = {"name": "weight_scale_inv"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "fmt": "e4m3", "weight_block_size": [24, 40]}
STATIC = {**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head", "model.layers.0.block_sparse_moe.gate"]}
F4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}

FORMATS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gptq": (gptq, {}, GPTQ),
    "gptq v2 8 bits": (gptq, {"bits": 8, "v2": True}, {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}),
    "gptq symmetric": (gptq, {"symmetric": True, "group": 32}, {**GPTQ, "sym": True, "group_size": 32}),
    "gptq shuffled": (gptq, {"shuffled": True, "symmetric": True}, {**GPTQ, "sym": True, "desc_act": True}),
    "gptq whole rows": (gptq, {"group": None}, {**GPTQ, "group_size": -1}),
    "awq": (awq, {}, {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "version": "GEMM"}),
    "w4a16": (packed, {}, ct(W4, "pack-quantized")),
    "w4a16 asymmetric": (
        packed,
        {"symmetric": False, "group": 32},
        ct({**W4, "symmetric": False, "group_size": 32}, "pack-quantized"),
    ),
    "w8a16": (packed, {"bits": 8, "group": None}, ct(W8, "pack-quantized")),
    "w8a8": (integers, {}, ct(W8, "int-quantized")),
    "float-quantized": (float8, {}, ct(F8, "float-quantized")),
    "fp8 of a tensor": (float8, {"scale": "tensor", "extra": ["activation_scale"], **INV}, STATIC),
    "fp8 blocks": (float8, {"scale": "block", **INV}, BLOCKS),
    "fp8 blocks e8m0": (float8, {"scale": "block", "dtype": E8M0, **INV}, {**BLOCKS, "scale_fmt": "ue8m0"}),
    "nvfp4": (float4, {"kind": "nvfp4"}, ct(F4, "nvfp4-pack-quantized")),
    "mxfp4": (float4, {"kind": "mxfp4"}, ct({**F4, "group_size": 32}, "mxfp4-pack-quantized")),
    "modelopt nvfp4": (
        float4,
        {"kind": "nvfp4", "modelopt": True},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "model.layers.*.gate"]},
    ),
}
"""Name -> packer, what it is to do, and what config.json says."""


NO_LINEAR = ("norm", "moe.gate.", "mlp.gate.", "router", "shared_expert_gate")


def is_linear(name: str) -> bool:
    """Whether a tensor is what a quantiser changes: neither embeddings, heads, norms nor routers."""
    return name.endswith(".weight") and "layers" in name and not any(part in name for part in NO_LINEAR)


def apart(name: str, weight_EIO: np.ndarray, pack: Any) -> tuple[Tensors, np.ndarray]:
    """(the matrices of experts that one tensor has, each for itself and packed; what the tensor stands for)."""
    experts, _, projection = name.rpartition(".")
    names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
    stored, exact = {}, np.empty_like(weight_EIO)
    for i, weight_IO in enumerate(weight_EIO):
        parts = zip(names, np.split(weight_IO, len(names), 1), np.split(exact[i], len(names), 1), strict=True)
        for own, part_IO, exact_IO in parts:
            tensors, exact_OI = pack(part_IO.T)
            exact_IO[...] = exact_OI.T
            stored |= {f"{experts}.{i}.{own}.{end}": tensor for end, tensor in tensors.items()}
    return stored, exact


def write_quantised(folder: Path, kind: str, model: str = "llama", **changes: np.ndarray) -> Path:
    """A quantised checkpoint, beside a folder `exact` with the weights that it stands for. `changes` are tensors in
    place of others; None: there is none."""
    pack, options, described = FORMATS[kind]
    hf = MODELS[model]
    dense = random_tensors(tensor_shapes(hf), hf, seed=7)
    stored, exact = dict[str, Any](), dict[str, Any]()
    for name, weight in dense.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            of_experts, exact[name] = apart(name, weight, lambda weight_OI: pack(weight_OI, **options))
            stored |= of_experts
        elif not is_linear(name):
            stored[name] = exact[name] = weight
        else:
            own, exact[name] = pack(weight, **options)
            stored |= {name.removesuffix("weight") + end: tensor for end, tensor in own.items()}
    (folder / "exact").mkdir(parents=True)
    stored = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
    write(folder, stored, {**hf, "quantization_config": described})
    write(folder / "exact", exact, hf)
    return folder


def write(folder: Path, tensors: Tensors, hf: dict[str, Any]) -> None:
    whole = {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))


def read(path: Path) -> Tensors:
    """All tensors of a file, of which safetensors' own reader for numpy has no bfloat16."""
    tensors = {}
    for entry in read_header(path):
        with mapped(entry, STORED_DTYPES) as tensor:
            tensors[entry.name] = tensor.copy()
    return tensors
