"""Blocks of quantised weights, as llama.cpp defines them -> stored weights, all rows at once.

A row is whole blocks of 32 or 256 neighbouring inputs, so that rows can be cut or change places as they are. In most
blocks of 32 the lower halves of bytes are the first 16 inputs, and the upper halves the others.

Letters: R rows, B bytes of a row, N blocks of a row, C groups of a row's inputs, I inputs.
"""

import functools
from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxpaged.params.formats.float4 import MX_GROUP, numbers_of_codes
from jaxpaged.params.formats.gguf.types import TensorType
from jaxpaged.params.formats.stored_weight import StoredWeight, powers_of_two

PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Types of weights that are not quantised."""

SUPER, SMALL = 256, 32
"""Inputs of a block: the K types and IQ4_XS, and the others."""
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the codes of IQ4_NL and IQ4_XS mean."""


def decoded(rows_RB: np.ndarray, kind: TensorType) -> StoredWeight | np.ndarray:
    """The weights of some rows, in their bytes; those of plain types are an array [R, I].

    ValueError for a type that is not read, and for scales that are infinite or no number.
    """
    if kind.name in PLAIN:
        return np.ascontiguousarray(rows_RB).view(PLAIN[kind.name])
    if kind.name not in DECODERS:
        raise ValueError(f"weights of type {kind.name} are not read; {', '.join([*PLAIN, *DECODERS])} are")
    blocks = np.ascontiguousarray(rows_RB).reshape(len(rows_RB), -1, kind.num_bytes)
    return DECODERS[kind.name](blocks)


def q4_0(blocks: np.ndarray) -> StoredWeight:
    values = halves(cut(blocks, 2, 16))
    values -= 8
    return stored(values, half_floats(blocks, 0))


def q4_1(blocks: np.ndarray) -> StoredWeight:
    values = halves(cut(blocks, 4, 16))
    values -= 8
    return stored(values, half_floats(blocks, 0), -half_floats(blocks, 2), shift=8)


def q5_0(blocks: np.ndarray) -> StoredWeight:
    values = halves(cut(blocks, 6, 16))
    values |= bits_of(blocks[..., 2:6])
    values -= 16
    return stored(values, half_floats(blocks, 0))


def q5_1(blocks: np.ndarray) -> StoredWeight:
    values = halves(cut(blocks, 8, 16))
    values |= bits_of(blocks[..., 4:8])
    return stored(values, half_floats(blocks, 0), -half_floats(blocks, 2))


def q8_0(blocks: np.ndarray) -> StoredWeight:
    return stored(cut(blocks, 2, 32), half_floats(blocks, 0))


def mxfp4(blocks: np.ndarray) -> StoredWeight:
    scales_RC = powers_of_two(blocks[..., 0], "a block's exponent")
    values = looked_up(halves(cut(blocks, 1, 16)), pairs_of(numbers_of_codes().tobytes()))
    values_RI = values.reshape(len(blocks), -1).view(ml_dtypes.float8_e4m3fn)
    return StoredWeight(values_RI, scales_RC, None, MX_GROUP)


def iq4_nl(blocks: np.ndarray) -> StoredWeight:
    values = looked_up(halves(cut(blocks, 2, 16)), pairs_of(IQ4_VALUES.tobytes()))
    return stored(values, half_floats(blocks, 0))


def iq4_xs(blocks: np.ndarray) -> StoredWeight:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16).astype(np.int32)
    high = high >> np.arange(0, 16, 2) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(high.shape)
    scales = half_floats(blocks, 0) * ((low | high << 4) - 32).astype(np.float32)
    codes = halves(cut(blocks, 8, 128).reshape(*blocks.shape[:2], 8, 16))
    return stored(looked_up(codes, pairs_of(IQ4_VALUES.tobytes())), scales)


def q2_k(blocks: np.ndarray) -> StoredWeight:
    packed, scale, least = blocks[..., :16], half_floats(blocks, 80), half_floats(blocks, 82)
    return stored(quarters(cut(blocks, 16, 64)), scale * floats(packed & 15), least * floats(packed >> 4))


def q3_k(blocks: np.ndarray) -> StoredWeight:
    values = quarters(cut(blocks, 32, 64))
    # a byte of the mask has a bit for each 32 inputs of the block; those that are not set take off 4
    values -= bit_by_bit(~cut(blocks, 0, 32), 2)
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = np.concatenate([low & 15, low >> 4], axis=-1)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = (low | high << 4).astype(np.int32) - 32
    return stored(values, half_floats(blocks, 108) * floats(scales))


def q4_k(blocks: np.ndarray) -> StoredWeight:
    scales, minima = six_bits(blocks[..., 4:16])
    values = halves(cut(blocks, 16, 128).reshape(*blocks.shape[:2], 4, 32))
    values -= 8
    return stored(values, half_floats(blocks, 0) * scales, half_floats(blocks, 2) * minima, shift=8)


def q5_k(blocks: np.ndarray) -> StoredWeight:
    scales, minima = six_bits(blocks[..., 4:16])
    values = halves(cut(blocks, 48, 128).reshape(*blocks.shape[:2], 4, 32))
    values |= bit_by_bit(cut(blocks, 16, 32), 4).reshape(values.shape)
    return stored(values, half_floats(blocks, 0) * scales, half_floats(blocks, 2) * minima)


def q6_k(blocks: np.ndarray) -> StoredWeight:
    shape = blocks.shape[:2]
    # each half of a block: four times 32 inputs, of which two share bytes, and all share those of the upper bits
    values = halves(cut(blocks, 0, 128).reshape(*shape, 2, 64))
    upper = quarters(cut(blocks, 128, 64))
    upper <<= np.uint8(4)
    values |= upper.reshape(values.shape)
    values -= 32
    scales = blocks[..., 192:208].view(np.int8)
    return stored(values, half_floats(blocks, 208) * floats(scales))


DECODERS: dict[str, Callable[[np.ndarray], StoredWeight]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
    "MXFP4": mxfp4,
}
"""Type -> what decodes blocks [R, N, bytes] of it."""


def half_floats(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32 [R, N, 1]: the 16-bit float at a byte of each block. ValueError where one is infinite or no number."""
    found = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32)
    wrong = ~np.isfinite(found)
    if wrong.any():
        row, block, _ = map(int, np.unravel_index(np.argmax(wrong), wrong.shape))
        raise ValueError(f"the scale of block {block} in row {row} is {found[row, block, 0]}")
    return found


SIXTEEN = np.dtype(np.complex128)
"""What 16 bytes are copied as: one number is copied at once, where bytes are one by one."""


def cut(blocks: np.ndarray, at: int, count: int) -> np.ndarray:
    """uint8 [R, N, count], in memory of their own: bytes from `at` on of each block, a multiple of 16 of them."""
    shape, strides = (*blocks.shape[:2], count // 16), (*blocks.strides[:2], 16)
    return np.ndarray(shape, SIXTEEN, blocks, at, strides).copy().view(np.uint8)


def halves(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., 2 * bytes]: the lower halves of some bytes, a multiple of 16, then the upper ones."""
    *outer, count = packed.shape
    out = np.empty((*outer, 2, count // 16), SIXTEEN)
    out[..., 0, :] = (packed & np.uint8(15)).view(SIXTEEN)
    out[..., 1, :] = (packed >> np.uint8(4)).view(SIXTEEN)
    return out.view(np.uint8).reshape(*outer, 2 * count)


def quarters(packed: np.ndarray) -> np.ndarray:
    """uint8 [R, N, 256] of 2 bits each: of 32 bytes the lowest quarters, then the next ones, then of the other 32."""
    shape = packed.shape[:2]
    out = np.empty((*shape, 2, 4, 2), SIXTEEN)
    for i in range(4):
        out[..., i, :] = (packed >> np.uint8(2 * i) & np.uint8(3)).view(SIXTEEN).reshape(*shape, 2, 2)
    return out.view(np.uint8).reshape(*shape, SUPER)


def bit_by_bit(packed: np.ndarray, place: int) -> np.ndarray:
    """uint8 [R, N, 256]: of 32 bytes the lowest bits, then the next ones, each at a place of its own."""
    shape = packed.shape[:2]
    out = np.empty((*shape, 8, 2), SIXTEEN)
    for i in range(8):
        out[..., i, :] = ((packed >> np.uint8(i) & np.uint8(1)) << np.uint8(place)).view(SIXTEEN)
    return out.view(np.uint8).reshape(*shape, SUPER)


def bits_of(packed: np.ndarray) -> np.ndarray:
    """uint8 [R, N, 32]: the bits of four bytes, each as a fifth bit."""
    return np.take(fifth_bits(), packed, mode="clip").view(np.uint8).reshape(*packed.shape[:2], SMALL)


@functools.cache
def fifth_bits() -> np.ndarray:
    """[256]: the eight bits of a byte, each as a fifth bit of a byte, as one number of 64 bits."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little") << 4
    return bits.view(np.uint64)[:, 0]


def looked_up(codes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """uint8: what each of some codes of 4 bits means, two at a time."""
    return np.take(pairs, codes.view(np.uint16), mode="clip").view(np.uint8)


@functools.cache
def pairs_of(meanings: bytes) -> np.ndarray:
    """[0x0F10]: what the codes in two bytes mean, as one number of 16 bits, of the 16 bytes that codes mean."""
    pair, meaning = np.arange(0x0F10), np.frombuffer(meanings, np.uint8)
    return np.stack([meaning[pair & 15], meaning[pair >> 8]], axis=-1).view(np.uint16)[:, 0]


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [R, N, 8], twice: the scales and minima of Q4_K and Q5_K, of 6 bits in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=-1)
    return floats(scales), floats(minima)


def floats(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)


def stored(values: np.ndarray, scales: np.ndarray, minima: np.ndarray | None = None, shift: int = 0) -> StoredWeight:
    """Of numbers [R, N, ...] of 8 bits, and what their groups have [R, N, groups of a block]. `shift` was taken off
    the numbers, so that 4 bits of a signed number hold them.

    A group that is nothing but its minimum, with scale 0, becomes a scale times one number.
    """
    num_rows = len(values)
    values_RI = values.reshape(num_rows, -1).view(np.int8)
    scales_RC = scales.reshape(num_rows, -1)
    group = values_RI.shape[1] // scales_RC.shape[1]
    if minima is None:
        return StoredWeight(values_RI, scales_RC, None, group)
    minima_RC = np.broadcast_to(minima, scales.shape).reshape(num_rows, -1)
    flat = (scales_RC == 0) & (minima_RC != 0)
    zeros_RC = np.divide(minima_RC, scales_RC, out=np.zeros_like(scales_RC), where=scales_RC != 0)
    if flat.any():
        values_RI.reshape(*scales_RC.shape, group)[flat] = -shift
        scales_RC[flat], zeros_RC[flat] = minima_RC[flat], 1
    zeros_RC -= shift
    return StoredWeight(values_RI, scales_RC, zeros_RC, group, minima=np.ascontiguousarray(minima_RC), shift=shift)
