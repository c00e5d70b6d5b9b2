"""GPTQ's files: whole numbers of 4 or 8 bits packed along inputs, as AutoGPTQ and its successors write them.

    qweight I32 [I * bits / 32, O], scales F16 [C, O], qzeros I32 [C, O * bits / 32], g_idx I32 [I]

Version 1 stores every zero less one, and loses the borrow: the zero is (stored + 1) modulo 2^bits. Version 2 stores it.

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, W words, R some of the outputs.
"""

import numpy as np

from jaxpaged.params.formats.groups import in_order, order_of_groups
from jaxpaged.params.formats.packing import check_bits, check_words, fields_of_words, middle_of, signed_fields, turned
from jaxpaged.params.formats.stored_weight import ALL, Rows, StoredWeight, checked_scales, group_size


def gptq(
    qweight_WO: np.ndarray,
    scales_CO: np.ndarray,
    qzeros_CW: np.ndarray | None,
    g_idx_I: np.ndarray | None,
    *,
    bits: int,
    is_symmetric: bool,
    is_v2: bool,
    rows: Rows = ALL,
) -> StoredWeight:
    """Outputs `rows` of a matrix. The tensors are whole: outputs are their last axis, in `qzeros` packed.

    Symmetric files need no zeros; theirs must be the middle, in the spelling of either version. ValueError for tensors
    that do not fit each other, and for scales that are zero or no number.
    """
    check_bits(bits)
    per_word = 32 // bits
    (words, outputs), (groups, _) = qweight_WO.shape, scales_CO.shape
    inputs = words * per_word
    check_words("scales", scales_CO.shape, (groups, outputs))
    group = group_size(inputs, groups, "scales")
    order = None
    if g_idx_I is not None:
        check_words("g_idx", g_idx_I.shape, (inputs,))
        order = order_of_groups(g_idx_I, groups, "g_idx")
    values_RI = signed_fields(turned(qweight_WO[:, rows]), bits)
    zeros_RC = None
    if qzeros_CW is not None:
        check_words("qzeros", qzeros_CW.shape, (groups, outputs // per_word))
        stored_CO = fields_of_words(qzeros_CW, bits)
        if is_symmetric:
            check_middle(stored_CO, bits)
        else:
            zeros_RC = zeros_of(stored_CO[:, rows], bits, is_v2)
    elif not is_symmetric:
        raise ValueError("qzeros are missing, but the weights are not symmetric")
    scales_RC = checked_scales(scales_CO[:, rows].T, "scales")
    return StoredWeight(in_order(values_RI, order), scales_RC, zeros_RC, group, order)


def zeros_of(stored_CR: np.ndarray, bits: int, is_v2: bool) -> np.ndarray | None:
    """float32 [R, C] less 2^(bits - 1), as values are; None where all are 0."""
    middle, mask = middle_of(bits), (1 << bits) - 1
    zeros_CR = stored_CR if is_v2 else (stored_CR + np.uint8(1)) & np.uint8(mask)
    return None if (zeros_CR == middle).all() else zeros_CR.T.astype(np.float32) - np.float32(middle)


def check_middle(stored_CO: np.ndarray, bits: int) -> None:
    """ValueError unless all zeros are 2^(bits - 1), as one of the versions stores it."""
    middle, first = middle_of(bits), int(stored_CO.flat[0]) if stored_CO.size else 0
    wrong = stored_CO != first
    if first in (middle, middle - 1) and not wrong.any():
        return
    found = int(stored_CO[wrong][0]) if first in (middle, middle - 1) else first
    raise ValueError(f"the weights are symmetric, but qzeros hold {found} where {middle - 1} or {middle} is expected")
