"""8-bit floats with a scale for the matrix, for every output, or for every block of outputs and inputs.

    weight F8_E4M3 or F8_E5M2 [O, I], and a scale (weight_scale, weight_scale_inv): [] or [1], [O] or [O, 1], or
    [ceil(O / rows), ceil(I / columns)] of a block, in BF16, F32, or as a power of two in a byte (F8_E8M0, U8)

A weight is value times scale, also where the scale is called "inverse": DeepSeek-V3 (arXiv 2412.19437, section 3.3.2)
has it so, and the last blocks may be smaller.

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, R some of the outputs.
"""

import numpy as np

from jaxpaged.params.formats.packing import check_words
from jaxpaged.params.formats.stored_weight import (
    ALL,
    EIGHT_BITS,
    Rows,
    StoredWeight,
    checked_scales,
    group_size,
    num_rows_of,
    powers_of_two,
    scales_of_rows,
)


def float8(
    weight_OI: np.ndarray,
    scale: np.ndarray,
    *,
    block: tuple[int, int] | None = None,
    name: str = "weight_scale",
    rows: Rows = ALL,
) -> StoredWeight:
    """Outputs `rows` of a matrix; outputs are the first axis of whole tensors. `block`: outputs and inputs that share
    a scale; `name` is that of the scale in errors.

    ValueError for tensors that do not fit each other, and for scales that are zero or no number.
    """
    if weight_OI.dtype not in EIGHT_BITS:
        raise ValueError(f"weights are {weight_OI.dtype}, and no 8-bit floats")
    (outputs, inputs), floats = weight_OI.shape, floats_of_scales(scale, name)
    if block is None:
        scales_RC = scales_of_rows(floats, outputs, rows, name)
        return StoredWeight(weight_OI[rows], scales_RC, None, group_size(inputs, scales_RC.shape[1], name))
    check_words(name, floats.shape, (-(-outputs // block[0]), -(-inputs // block[1])))
    scales_RC = checked_scales(floats, name)[num_rows_of(rows, outputs) // block[0]]
    return StoredWeight(weight_OI[rows], scales_RC, None, block[1])


def floats_of_scales(scale: np.ndarray, name: str) -> np.ndarray:
    """Scales as floats: bytes are exponents."""
    return powers_of_two(scale, name) if scale.dtype.itemsize == 1 else scale
