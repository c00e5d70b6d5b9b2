"""Blocks of quantised weights, as llama.cpp defines them -> stored weights, all rows at once.

A row is whole blocks of 32 or 256 neighbouring inputs, so that rows can be cut or change places as they are. In most
blocks of 32 the lower halves of bytes are the first 16 inputs, and the upper halves the others.

Letters: R rows, B bytes of a row, N blocks of a row, C groups of a row's inputs, I inputs.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from jaxpaged.params.formats.float4 import MX_GROUP, e2m1_of_codes
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
    values = halves(blocks[..., 2:])
    values -= 8
    return stored(values, half_floats(blocks, 0))


def q4_1(blocks: np.ndarray) -> StoredWeight:
    values = halves(blocks[..., 4:])
    values -= 8
    return stored(values, half_floats(blocks, 0), -half_floats(blocks, 2), shift=8)


def q5_0(blocks: np.ndarray) -> StoredWeight:
    values = halves(blocks[..., 6:])
    values |= bits_of(blocks[..., 2:6])
    values -= 16
    return stored(values, half_floats(blocks, 0))


def q5_1(blocks: np.ndarray) -> StoredWeight:
    values = halves(blocks[..., 8:])
    values |= bits_of(blocks[..., 4:8])
    return stored(values, half_floats(blocks, 0), -half_floats(blocks, 2))


def q8_0(blocks: np.ndarray) -> StoredWeight:
    return stored(blocks[..., 2:].copy(), half_floats(blocks, 0))


def mxfp4(blocks: np.ndarray) -> StoredWeight:
    scales_RC = powers_of_two(blocks[..., 0], "a block's exponent")
    values = e2m1_of_codes(halves(blocks[..., 1:]))
    return StoredWeight(values.reshape(len(blocks), -1), scales_RC, None, MX_GROUP)


def iq4_nl(blocks: np.ndarray) -> StoredWeight:
    values = np.take(IQ4_VALUES, halves(blocks[..., 2:]), mode="clip")
    return stored(values, half_floats(blocks, 0))


def iq4_xs(blocks: np.ndarray) -> StoredWeight:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16).astype(np.int32)
    high = high >> np.arange(0, 16, 2) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(high.shape)
    scales = half_floats(blocks, 0) * ((low | high << 4) - 32).astype(np.float32)
    fours = halves(blocks[..., 8:].reshape(*blocks.shape[:2], 8, 16))
    return stored(np.take(IQ4_VALUES, fours, mode="clip"), scales)


def q2_k(blocks: np.ndarray) -> StoredWeight:
    packed, scale, least = blocks[..., :16], half_floats(blocks, 80), half_floats(blocks, 82)
    return stored(quarters(blocks[..., 16:80]), scale * floats(packed & 15), least * floats(packed >> 4))


def q3_k(blocks: np.ndarray) -> StoredWeight:
    values = quarters(blocks[..., 32:96])
    # a byte of the mask has a bit for each 32 inputs of the block; those that are not set take off 4
    mask = ~blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    values -= (mask << np.uint8(2)).reshape(values.shape)
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = np.concatenate([low & 15, low >> 4], axis=-1)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    scales = (low | high << 4).astype(np.int32) - 32
    return stored(values, half_floats(blocks, 108) * floats(scales))


def q4_k(blocks: np.ndarray) -> StoredWeight:
    scales, minima = six_bits(blocks[..., 4:16])
    values = halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    values -= 8
    return stored(values, half_floats(blocks, 0) * scales, half_floats(blocks, 2) * minima, shift=8)


def q5_k(blocks: np.ndarray) -> StoredWeight:
    scales, minima = six_bits(blocks[..., 4:16])
    values = halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    values |= (fifth << np.uint8(4)).reshape(values.shape)
    return stored(values, half_floats(blocks, 0) * scales, half_floats(blocks, 2) * minima)


def q6_k(blocks: np.ndarray) -> StoredWeight:
    shape = blocks.shape[:2]
    # each half of a block: four times 32 inputs, of which two share bytes, and all share those of the upper bits
    values = halves(blocks[..., :128].reshape(*shape, 2, 64))
    upper = quarters(blocks[..., 128:192])
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


def halves(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., 2 * bytes]: the lower halves of some bytes, then the upper ones."""
    packed = np.ascontiguousarray(packed)
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=out[..., 0, :])
    np.right_shift(packed, np.uint8(4), out=out[..., 1, :])
    return out.reshape(*packed.shape[:-1], -1)


def quarters(packed: np.ndarray) -> np.ndarray:
    """uint8 [R, N, 256] of 2 bits each: of 32 bytes the lowest quarters, then the next ones, then of the other 32."""
    bytes_ = packed.reshape(*packed.shape[:2], 2, 1, 32)
    fields = bytes_ >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    fields &= np.uint8(3)
    return fields.reshape(*packed.shape[:2], SUPER)


def bits_of(packed: np.ndarray) -> np.ndarray:
    """uint8 [R, N, 32]: the bits of four bytes, each as a fifth bit."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")
    bits <<= np.uint8(4)
    return bits


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
