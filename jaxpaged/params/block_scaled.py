"""Weights that a checkpoint keeps in 8-bit floats, a float32 scale for every block of a matrix: DeepSeek-V3's format.

A matrix `NAME` [O, I] of type F8_E4M3 has a tensor `NAME_scale_inv` beside it, one scale for each block of rows and
columns, the last ones of which may be smaller (arXiv 2412.19437, section 3.3.2): a weight is its value times the scale.
Both are multiplied when the weight is loaded, and nothing behind that knows of blocks. Knows files, and no models.

Letters: I inputs and O outputs of a matrix.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.safetensors_reader import DTYPES, EIGHT_BITS, TensorEntry, mapped

SCALES = "_scale_inv"
"""The end of the name of a tensor of scales."""

VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""What each byte means. Looking it up is several times as fast as converting."""


def without_scales(
    entries: Mapping[str, TensorEntry], block: tuple[int, int] | None
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """(entries of weights, those of scales by the name of their weight); no scales unless weights have blocks.

    Raises CheckpointError where weights and scales do not belong together.
    """
    if block is None:
        return dict(entries), {}
    scales = {name.removesuffix(SCALES): entry for name, entry in entries.items() if name.endswith(SCALES)}
    weights = {name: entry for name, entry in entries.items() if not name.endswith(SCALES)}
    eight_bits = {name for name, entry in weights.items() if entry.dtype in EIGHT_BITS}
    for name in sorted(eight_bits ^ scales.keys()):
        entry = weights.get(name) or scales[name]
        raise CheckpointError(
            f"{entry.path}: weights of 8 bits and tensors of their scales do not belong together, first at {name}. "
            "Download the model again."
        )
    for name, entry in scales.items():
        rows_and_columns = weights[name].shape
        expected = tuple(-(-size // edge) for size, edge in zip(rows_and_columns, block))
        if len(rows_and_columns) != 2 or entry.shape != expected:
            raise CheckpointError(
                f"{entry.path}: the scales of {name} have shape {entry.shape}, but a weight of {rows_and_columns} in "
                f"blocks of {block} has {expected}. Check that config.json belongs to these weights."
            )
    return weights, scales


def scaled(entry: TensorEntry, scales: TensorEntry, block: tuple[int, int], dtype: Any) -> np.ndarray:
    """The weight itself, in `dtype`. Of both tensors only what is worked on is in memory twice."""
    with mapped(entry, EIGHT_BITS) as value_OI, mapped(scales, DTYPES) as scale_OI:
        return times_scales(value_OI, scale_OI, block, dtype)


def times_scales(value_OI: np.ndarray, scale_OI: np.ndarray, block: tuple[int, int], dtype: Any) -> np.ndarray:
    """Every value times the scale of its block, in float32 and then rounded to `dtype`."""
    (rows, columns), out_OI = block, np.empty(value_OI.shape, dtype)
    for i, scale_I in enumerate(scale_OI.astype(np.float32)):
        part = slice(i * rows, (i + 1) * rows)
        whole_I = np.repeat(scale_I, columns)[: value_OI.shape[1]]
        out_OI[part] = VALUES[value_OI[part].view(np.uint8)] * whole_I
    return out_OI
