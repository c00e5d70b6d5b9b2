"""What a decoded weight stands for, and what decoders refuse. That they decode as others write: test_golden.py."""

import ml_dtypes
import numpy as np
import pytest

from jaxpaged.params.formats.awq import awq
from jaxpaged.params.formats.compressed_tensors import integers, packed_integers
from jaxpaged.params.formats.float4 import mxfp4, nvfp4
from jaxpaged.params.formats.float8 import float8
from jaxpaged.params.formats.gptq import gptq
from jaxpaged.params.formats.packing import fields_of_words, turned
from jaxpaged.params.formats.stored_weight import WORKED_ON, StoredWeight, as_float32

RANDOM = np.random.default_rng(0)
E4M3 = ml_dtypes.float8_e4m3fn


def words(*shape):
    return RANDOM.integers(-(2**31), 2**31, shape, dtype=np.int32)


def scales(*shape, dtype=np.float16):
    return (RANDOM.random(shape) + 0.1).astype(dtype)


def eight_bits(*shape):
    return RANDOM.integers(0, 120, shape, dtype=np.uint8).view(E4M3)


def gptq_tensors(bits=4, inputs=64, outputs=24, groups=2):
    per_word = 32 // bits
    return {
        "qweight_WO": words(inputs // per_word, outputs),
        "scales_CO": scales(groups, outputs),
        "qzeros_CW": words(groups, outputs // per_word),
        "g_idx_I": None,
    }


@pytest.mark.parametrize("dtype", [np.int8, E4M3, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("columns", [6, 7])
def test_looking_floats_up_is_converting_them(dtype, columns):
    values = np.arange(42, dtype=np.uint8).reshape(-1, columns).view(dtype)
    np.testing.assert_array_equal(as_float32(values), values.astype(np.float32))


def test_large_matrices_are_unpacked_in_pieces_without_a_seam():
    tall, wide = words(1300, 130), words(130, 1300)
    np.testing.assert_array_equal(turned(tall), tall.T)
    np.testing.assert_array_equal(turned(wide), wide.T)
    assert 4 * tall.size > 5 * WORKED_ON
    expected = tall.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    np.testing.assert_array_equal(fields_of_words(tall, 4), expected.reshape(1300, -1))
    values = RANDOM.integers(-8, 8, (1300, 520), dtype=np.int8)
    weight = StoredWeight(values, np.arange(1, 1301, dtype=np.float32)[:, None], None, 520)
    np.testing.assert_array_equal(weight.dequantized(np.float32), values * np.arange(1, 1301)[:, None])


def test_a_weight_is_value_less_zero_times_scale_in_the_model_s_order_of_inputs():
    values = np.array([[1, 2, 3, 4]], np.int8)
    weight = StoredWeight(values, np.float32([[10, 100]]), np.float32([[1, 0]]), group=2, order=np.array([2, 0, 3, 1]))
    np.testing.assert_array_equal(weight.dequantized(np.float32), [[10, 400, 0, 300]])


def test_a_last_group_may_be_smaller():
    weight = StoredWeight(np.ones((1, 5), np.int8), np.float32([[1, 2, 3]]), None, group=2)
    np.testing.assert_array_equal(weight.dequantized(np.float32), [[1, 1, 2, 2, 3]])


@pytest.mark.parametrize("rows", [slice(3, 17), slice(0, 24, 2), slice(1, 24, 2), np.array([5, 0, 23, 7])])
@pytest.mark.parametrize(
    "decode",
    [
        lambda rows: gptq(**GPTQ, bits=4, is_symmetric=False, is_v2=False, rows=rows),
        lambda rows: gptq(**GPTQ8, bits=8, is_symmetric=False, is_v2=True, rows=rows),
        lambda rows: awq(**AWQ, rows=rows),
        lambda rows: packed_integers(**PACKED, bits=4, inputs=60, rows=rows),
        lambda rows: integers(np.arange(96, dtype=np.int8).reshape(24, 4), SCALES, rows=rows),
        lambda rows: float8(FLOATS, scales(1, dtype=np.float32)[0:1] * 0 + 3, rows=rows),
        lambda rows: float8(FLOATS, BLOCKS, block=(10, 8), rows=rows),
        lambda rows: mxfp4(NIBBLES, EXPONENTS, rows=rows),
        lambda rows: nvfp4(NIBBLES, NV_SCALES, np.float32([3]), is_divisor=True, rows=rows),
    ],
)
def test_some_rows_are_those_of_all(decode, rows):
    whole, some = decode(slice(None)).dequantized(np.float32), decode(rows).dequantized(np.float32)
    np.testing.assert_array_equal(some, whole[rows])


GPTQ, GPTQ8 = gptq_tensors(), gptq_tensors(bits=8)
AWQ = {"qweight_IW": words(64, 3), "scales_CO": scales(2, 24), "qzeros_CW": words(2, 3)}
PACKED = {
    "weight_packed_OW": words(24, 8),
    "weight_scale": scales(24, 4),
    "weight_zero_point_WC": words(3, 4),
    "weight_g_idx_I": RANDOM.permutation(np.repeat(np.arange(4), 15)),
}
SCALES, FLOATS, BLOCKS = scales(24, 1), eight_bits(24, 20), scales(3, 3, dtype=np.float32)
NIBBLES = RANDOM.integers(0, 256, (24, 32), dtype=np.uint8)
EXPONENTS, NV_SCALES = (
    RANDOM.integers(110, 130, (24, 2), dtype=np.uint8),
    RANDOM.integers(1, 120, (24, 4), dtype=np.uint8).view(E4M3),
)


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


@pytest.mark.parametrize("wrong", [0, np.nan, np.inf])
@pytest.mark.parametrize(
    "decode",
    [
        lambda wrong: gptq(**GPTQ | {"scales_CO": wrong(GPTQ["scales_CO"])}, bits=4, is_symmetric=False, is_v2=False),
        lambda wrong: awq(**AWQ | {"scales_CO": wrong(AWQ["scales_CO"])}),
        lambda wrong: packed_integers(**PACKED | {"weight_scale": wrong(PACKED["weight_scale"])}, bits=4, inputs=60),
        lambda wrong: integers(np.ones((24, 4), np.int8), wrong(SCALES)),
        lambda wrong: float8(FLOATS, wrong(SCALES)),
        lambda wrong: float8(FLOATS, wrong(BLOCKS), block=(10, 8)),
        lambda wrong: nvfp4(NIBBLES, NV_SCALES, wrong(np.ones((1, 1), np.float32))[0], is_divisor=False),
    ],
)
def test_scales_that_are_no_scales_are_refused(decode, wrong):
    with pytest.raises(ValueError, match="scale.*1 of"):
        decode(lambda array: changed(array, (-1, 0), wrong))


def test_a_block_scale_of_nvfp4_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"weight_scale\[3, 1\] is nan"):
        nvfp4(NIBBLES, changed(NV_SCALES, (3, 1), np.nan), np.float32([3]), is_divisor=True)


def test_an_exponent_of_255_is_no_number():
    with pytest.raises(ValueError, match=r"weight_scale\[3, 1\] is 255"):
        mxfp4(NIBBLES, changed(EXPONENTS, (3, 1), 255))
    with pytest.raises(ValueError, match=r"scale_inv\[2, 0\] is 255"):
        float8(FLOATS, changed(np.full((3, 3), 127, np.uint8), (2, 0), 255), block=(10, 8), name="scale_inv")


@pytest.mark.parametrize(
    ("g_idx", "words"),
    [
        (np.repeat([0, 2], 32), "groups 0 to 2, but there are 2"),
        (np.repeat([-1, 1], 32), "groups -1 to 1"),
        (np.repeat([0, 1], [30, 34]), "group 0 30 inputs and group 1 34"),
        (np.repeat([0, 1], 16), "g_idx has shape"),
    ],
)
def test_groups_that_are_no_groups_are_refused(g_idx, words):
    with pytest.raises(ValueError, match=words):
        gptq(**GPTQ | {"g_idx_I": g_idx}, bits=4, is_symmetric=False, is_v2=False)


def test_groups_that_are_neighbours_already_need_no_order():
    neighbours = gptq(**GPTQ | {"g_idx_I": np.repeat([0, 1], 32)}, bits=4, is_symmetric=False, is_v2=False)
    assert neighbours.order is None
    turns = gptq(**GPTQ | {"g_idx_I": np.tile([0, 1], 32)}, bits=4, is_symmetric=False, is_v2=False)
    assert list(turns.order[:3]) == [0, 2, 4]


@pytest.mark.parametrize("zero", [7, 8])
def test_symmetric_files_have_their_zeros_in_the_middle_in_either_spelling(zero):
    qzeros = np.full((2, 3), int(f"{zero}" * 8, 16), np.uint32).view(np.int32)
    tensors = GPTQ | {"qzeros_CW": qzeros}
    assert gptq(**tensors, bits=4, is_symmetric=True, is_v2=False).zeros is None
    tensors = GPTQ | {"qzeros_CW": changed(qzeros, (1, 1), 0x77777774)}
    with pytest.raises(ValueError, match="symmetric, but qzeros hold"):
        gptq(**tensors, bits=4, is_symmetric=True, is_v2=False)


@pytest.mark.parametrize(
    "decode",
    [
        lambda: gptq(**GPTQ | {"qzeros_CW": None}, bits=4, is_symmetric=False, is_v2=False),
        lambda: gptq(**GPTQ | {"qzeros_CW": words(2, 4)}, bits=4, is_symmetric=False, is_v2=False),
        lambda: gptq(**GPTQ | {"scales_CO": scales(3, 24)}, bits=4, is_symmetric=False, is_v2=False),
        lambda: gptq(**GPTQ, bits=3, is_symmetric=False, is_v2=False),
        lambda: awq(**AWQ | {"qweight_IW": words(64, 4)}),
        lambda: awq(**AWQ | {"qzeros_CW": words(3, 3)}),
        lambda: awq(**AWQ | {"scales_CO": scales(2, 25)}),
        lambda: packed_integers(**PACKED, bits=4, inputs=68),
        lambda: packed_integers(**PACKED, bits=4, inputs=58),
        lambda: packed_integers(**PACKED | {"weight_zero_point_WC": words(2, 4)}, bits=4, inputs=60),
        lambda: packed_integers(**PACKED | {"weight_scale": scales(23, 4)}, bits=4, inputs=60),
        lambda: float8(FLOATS, scales(2, 3), block=(10, 8)),
        lambda: float8(FLOATS.view(np.int8), SCALES),
        lambda: mxfp4(NIBBLES[:, 1:], EXPONENTS),
        lambda: nvfp4(NIBBLES, NV_SCALES[1:], np.float32([3]), is_divisor=True),
        lambda: nvfp4(NIBBLES, NV_SCALES, np.float32([3, 3]), is_divisor=True),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(decode):
    with pytest.raises(ValueError, match="shape|group|missing|bits|floats"):
        decode()
