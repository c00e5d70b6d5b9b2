"""Blocks mean what ggml's C functions make of them, bit for bit: see scripts/update_gguf_goldens.py."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.params.formats.gguf.blocks import DECODERS, decoded
from jaxpaged.params.formats.gguf.types import TYPES

BY_NAME = {kind.name: kind for kind in TYPES.values()}
SCALES = {"Q4_0": 0, "Q6_K": 208, "Q4_K": 2, "Q3_K": 108}
"""Type -> where a scale of its first block is."""


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(Path(__file__).parents[3] / "golden" / "formats" / "gguf_weights.npz"))


@pytest.mark.parametrize("name", DECODERS)
def test_blocks_mean_what_ggml_makes_of_them(name, golden):
    weight = decoded(golden[f"{name}/rows"], BY_NAME[name])
    np.testing.assert_array_equal(weight.dequantized(np.float32), golden[f"{name}/weight"])


@pytest.mark.parametrize("name", DECODERS)
def test_rows_may_be_cut_and_change_places_before_they_are_decoded(name, golden):
    some = golden[f"{name}/rows"][[4, 2, 0]]
    weight = decoded(some, BY_NAME[name]).dequantized(np.float32)
    np.testing.assert_array_equal(weight, golden[f"{name}/weight"][[4, 2, 0]])


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"])
def test_zeros_stand_for_minima(name, golden):
    """A kernel has zeros, not minima. Both mean the same, up to a rounding."""
    weight = decoded(golden[f"{name}/rows"], BY_NAME[name])
    group = weight.group
    values = weight.values.astype(np.float32)
    of_zeros = (values - weight.zeros.repeat(group, axis=1)) * weight.scales.repeat(group, axis=1)
    expected = golden[f"{name}/weight"]
    np.testing.assert_allclose(of_zeros, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)])
def test_plain_types_are_arrays(name, dtype):
    weight = np.arange(12).reshape(3, 4).astype(dtype)
    found = decoded(weight.view(np.uint8), BY_NAME[name])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, weight)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_that_is_no_number_is_refused(name, golden):
    rows = golden[f"{name}/rows"].copy()
    rows[1, SCALES[name] : SCALES[name] + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="block 0 in row 1 is nan"):
        decoded(rows, BY_NAME[name])


def test_other_types_are_refused_by_name():
    with pytest.raises(ValueError, match="IQ2_XXS are not read; F32, .*Q4_K"):
        decoded(np.zeros((1, 66), np.uint8), BY_NAME["IQ2_XXS"])
