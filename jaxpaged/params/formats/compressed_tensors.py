"""Whole numbers as compressed-tensors writes them: packed along inputs (W4A16, W8A16), or a byte each (W8A8).

    pack-quantized: weight_packed I32 [O, ceil(I * bits / 32)], weight_scale [O, C], weight_shape I64 [2] = [O, I],
                    weight_zero_point I32 [ceil(O * bits / 32), C], packed along outputs, weight_g_idx I32 [I]
    int-quantized:  weight I8 [O, I], weight_scale [O, 1] or [1]

Packed numbers are stored more by 2^(bits - 1), zeros too. Its 8-bit floats are in float8.py, its 4-bit ones in
float4.py.

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, W words, R some of the outputs.
"""

import numpy as np

from jaxpaged.params.formats.groups import in_order, order_of_groups
from jaxpaged.params.formats.packing import check_bits, check_words, signed_fields, turned
from jaxpaged.params.formats.stored_weight import ALL, Rows, StoredWeight, group_size, scales_of_rows


def packed_integers(
    weight_packed_OW: np.ndarray,
    weight_scale: np.ndarray,
    weight_zero_point_WC: np.ndarray | None,
    weight_g_idx_I: np.ndarray | None,
    *,
    bits: int,
    inputs: int,
    rows: Rows = ALL,
) -> StoredWeight:
    """Outputs `rows` of a matrix of so many inputs. The tensors are whole: outputs are their first axis, in
    `weight_zero_point` packed.

    ValueError for tensors that do not fit each other, and for scales that are zero or no number.
    """
    check_bits(bits)
    outputs, per_word = len(weight_packed_OW), 32 // bits
    check_words("weight_packed", weight_packed_OW.shape, (outputs, -(-inputs // per_word)))
    scales_RC = scales_of_rows(weight_scale, outputs, rows, "weight_scale")
    groups = scales_RC.shape[1]
    group = group_size(inputs, groups, "weight_scale")
    order = None
    if weight_g_idx_I is not None:
        check_words("weight_g_idx", weight_g_idx_I.shape, (inputs,))
        order = order_of_groups(weight_g_idx_I, groups, "weight_g_idx")
    values_RI = signed_fields(weight_packed_OW[rows], bits)[:, :inputs]
    zeros_RC = None
    if weight_zero_point_WC is not None:
        check_words("weight_zero_point", weight_zero_point_WC.shape, (-(-outputs // per_word), groups))
        zeros_CO = signed_fields(turned(weight_zero_point_WC), bits)[:, :outputs]
        zeros_RC = zeros_CO[:, rows].T.astype(np.float32)
    return StoredWeight(in_order(values_RI, order), scales_RC, zeros_RC, group, order)


def integers(weight_OI: np.ndarray, weight_scale: np.ndarray, *, rows: Rows = ALL) -> StoredWeight:
    """Outputs `rows` of an int8 matrix with a scale for all of it, for each output, or for groups; the first axis.

    Raises what `packed_integers` does.
    """
    outputs, inputs = weight_OI.shape
    scales_RC = scales_of_rows(weight_scale, outputs, rows, "weight_scale")
    group = group_size(inputs, scales_RC.shape[1], "weight_scale")
    return StoredWeight(weight_OI[rows], scales_RC, None, group)
