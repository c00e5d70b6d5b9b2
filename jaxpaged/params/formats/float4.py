"""4-bit floats E2M1, two in a byte with the lower bits first: MXFP4 and NVFP4.

MXFP4 (the Open Compute Project's "Microscaling Formats", version 1.0): 32 inputs share a power of two, a byte.

    weight_packed U8 [O, I / 2] or [O, I / 32, 16], weight_scale U8 [O, I / 32]; gpt-oss says _blocks and _scales

NVFP4: 16 inputs share a scale F8_E4M3, and the matrix one more in F32, by which compressed-tensors divides
(weight_global_scale) and ModelOpt multiplies (weight_scale_2).

Values become float8_e4m3fn, which has all of them.

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, B bytes, R some of the outputs.
"""

import functools

import ml_dtypes
import numpy as np

from jaxpaged.params.formats.packing import check_words
from jaxpaged.params.formats.stored_weight import (
    ALL,
    Rows,
    StoredWeight,
    checked_scales,
    floats_of_bytes,
    powers_of_two,
    row_ranges,
)

E2M1 = "float4_e2m1fn"
MX_GROUP, NV_GROUP = 32, 16
"""Inputs that share a scale."""


def mxfp4(
    packed: np.ndarray, exponents_OC: np.ndarray, *, name: str = "weight_scale", rows: Rows = ALL
) -> StoredWeight:
    """Outputs `rows` of a matrix; outputs are the first axis of whole tensors. `name` is that of exponents in errors.

    ValueError for tensors that do not fit each other, and for an exponent that stands for no number.
    """
    outputs, groups = exponents_OC.shape
    packed_OB = packed.reshape(len(packed), -1)
    check_words("packed weights", packed_OB.shape, (outputs, groups * MX_GROUP // 2))
    scales_RC = powers_of_two(exponents_OC[rows], name)
    return StoredWeight(e2m1_numbers(packed_OB[rows]), scales_RC, None, MX_GROUP)


def nvfp4(
    packed_OB: np.ndarray,
    scale_OC: np.ndarray,
    global_scale: np.ndarray,
    *,
    is_divisor: bool,
    name: str = "weight_scale",
    rows: Rows = ALL,
) -> StoredWeight:
    """Outputs `rows` of a matrix; outputs are the first axis of whole tensors. `is_divisor`: whether scales are divided
    by the global one; `name` is that of the scales in errors.

    ValueError for tensors that do not fit each other, and for scales that are zero or no number.
    """
    outputs, groups = scale_OC.shape
    check_words("packed weights", packed_OB.shape, (outputs, groups * NV_GROUP // 2))
    whole = checked_scales(global_scale.reshape(-1), "the global scale")
    check_words("the global scale", whole.shape, (1,))
    stored = scale_OC[rows]
    floats = floats_of_bytes(stored.dtype)[stored.view(np.uint8)] if stored.dtype.itemsize == 1 else stored
    scales_RC = checked_scales(floats, name)
    return StoredWeight(
        e2m1_numbers(packed_OB[rows]), scales_RC / whole if is_divisor else scales_RC * whole, None, NV_GROUP
    )


def e2m1_numbers(packed_RB: np.ndarray) -> np.ndarray:
    """float8_e4m3fn [R, I] of two E2M1 in a byte. They are looked up four at a time."""
    halves = np.ascontiguousarray(packed_RB).view(np.uint16)
    fours = np.empty(halves.shape, np.uint32)
    for rows in row_ranges(*halves.shape):
        np.take(fours_of_numbers(), halves[rows], out=fours[rows], mode="clip")
    return fours.view(ml_dtypes.float8_e4m3fn)


def e2m1_of(values: np.ndarray) -> np.ndarray:
    """float4_e2m1fn of float8_e4m3fn that E2M1 has."""
    return codes_of_bytes()[values.view(np.uint8)].view(ml_dtypes.float4_e2m1fn)


@functools.cache
def codes_of_bytes() -> np.ndarray:
    """[256]: the code of E2M1 that each byte of float8_e4m3fn is; 0 for numbers that it has not."""
    codes = np.zeros(256, np.uint8)
    codes[numbers_of_codes()] = np.arange(16)
    return codes


@functools.cache
def numbers_of_codes() -> np.ndarray:
    """[16]: the byte of float8_e4m3fn that each code of E2M1 is."""
    codes = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    return codes.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@functools.cache
def fours_of_numbers() -> np.ndarray:
    """[65536]: the four float8_e4m3fn of two bytes, as one number of 32 bits."""
    fields = np.arange(2**16)[:, None] >> np.array([0, 4, 8, 12]) & 15
    return numbers_of_codes()[fields].view(np.uint32)[:, 0]
