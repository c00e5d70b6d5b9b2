"""Decoders give what the libraries that write the formats give, bit for bit: see scripts/update_format_goldens.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpaged.params.formats.awq import awq
from jaxpaged.params.formats.compressed_tensors import integers, packed_integers
from jaxpaged.params.formats.float4 import mxfp4, nvfp4
from jaxpaged.params.formats.float8 import float8
from jaxpaged.params.formats.gptq import gptq
from jaxpaged.params.formats.stored_weight import StoredWeight
from tests.models.quantised_checkpoints import read

GOLDEN = Path(__file__).parents[2] / "golden" / "formats"
CASES = json.loads((GOLDEN / "weights.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors():
    return read(GOLDEN / "weights.safetensors")


def decoded(own: dict[str, np.ndarray], format: str, **given) -> StoredWeight:
    match format:
        case "gptq":
            return gptq(own["qweight"], own["scales"], own["qzeros"], own["g_idx"], **given)
        case "awq":
            return awq(own["qweight"], own["scales"], own["qzeros"])
        case "pack-quantized":
            inputs = int(own["weight_shape"][1])
            zeros = own.get("weight_zero_point")
            return packed_integers(own["weight_packed"], own["weight_scale"], zeros, None, inputs=inputs, **given)
        case "int-quantized":
            return integers(own["weight"], own["weight_scale"])
        case "float-quantized":
            return float8(own["weight"], own["weight_scale"], **given)
        case "fp8":
            return float8(own["weight"], own["weight_scale_inv"], **given)
        case "nvfp4-pack-quantized":
            return nvfp4(own["weight_packed"], own["weight_scale"], own["weight_global_scale"], **given)
        case "mxfp4-pack-quantized":
            return mxfp4(own["weight_packed"], own["weight_scale"])
        case "mxfp4":
            return mxfp4(own["blocks"], own["scales"])


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_library(name, tensors):
    own = {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}
    expected = own["weight_out"]
    weight = decoded(own, **CASES[name])
    np.testing.assert_array_equal(weight.dequantized(expected.dtype), expected)


def test_the_other_maker_of_nvfp4_multiplies(tensors):
    """ModelOpt's second scale is the reciprocal of compressed-tensors' global one."""
    packed, scale = tensors["ct_nvfp4/weight_packed"], tensors["ct_nvfp4/weight_scale"]
    second = 1 / tensors["ct_nvfp4/weight_global_scale"]
    weight = nvfp4(packed, scale, second, is_divisor=False)
    expected = tensors["ct_nvfp4/weight_out"].astype(np.float32)
    np.testing.assert_allclose(weight.dequantized(np.float32), expected, rtol=0.004)


def test_inputs_may_say_their_groups_one_by_one(tensors):
    """compressed-tensors' `weight_g_idx`, whose numbers and scales are those of neighbours in other places."""
    own = {key: tensors[f"ct4_asym/{key}"] for key in ("weight_packed", "weight_scale", "weight_zero_point")}
    group_of = np.random.default_rng(0).permutation(np.repeat(np.arange(3), 32))
    plain = packed_integers(*own.values(), None, bits=4, inputs=96)
    weight = packed_integers(*own.values(), group_of, bits=4, inputs=96)
    values = plain.values.astype(np.float32)
    expected = (values - plain.zeros[:, group_of]) * plain.scales[:, group_of]
    np.testing.assert_array_equal(weight.dequantized(np.float32), expected)
