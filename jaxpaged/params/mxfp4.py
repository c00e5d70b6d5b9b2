"""Weights in 4 bits as checkpoints store them: MXFP4 of the Open Compute Project's "Microscaling Formats", version 1.0.

Neighbours on the last axis, 32 at a time, are numbers of one sign bit, two of exponent and one of fraction (E2M1), two
in a byte with the lower one first, and have one power of two in common (E8M0, a byte). bfloat16 holds every product
exactly, so a model computes with the same weights as one that keeps them packed, in four times the memory.

Knows numbers only. Letters: G groups of 32.
"""

import math

import ml_dtypes
import numpy as np

GROUP = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS, NOT_A_NUMBER = 127, 255
"""Of the shared exponents: what stands for 1, and what stands for no number at all."""


def encoded_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two tensors, bytes and exponents, of a weight of this shape."""
    *outputs, inputs = shape
    return (*outputs, inputs // GROUP, GROUP // 2), (*outputs, inputs // GROUP)


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight in bfloat16 of its bytes [..., G, 16] and exponents [..., G], a slice of the first axis at a time."""
    pairs = pairs_of_numbers()
    result = np.empty(blocks.shape, np.uint32)
    for i, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
        np.take(pairs, scale.astype(np.uint16)[..., None] << 8 | block, out=result[i], mode="clip")
    weight = result.view(ml_dtypes.bfloat16)
    return weight.reshape(*scales.shape[:-1], math.prod(weight.shape[scales.ndim - 1 :]))


def pairs_of_numbers() -> np.ndarray:
    """[65536]: for an exponent and a byte behind it the two numbers, as one word of 32 bits."""
    numbers = np.array([*MAGNITUDES, *(-number for number in MAGNITUDES)])
    byte = np.arange(256)
    factors = np.ldexp(1.0, np.arange(256) - SCALE_BIAS)
    factors[NOT_A_NUMBER] = np.nan
    pairs = factors[:, None, None] * np.stack([numbers[byte & 15], numbers[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):  # the largest exponents are beyond all types here, and become infinity
        return pairs.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)
