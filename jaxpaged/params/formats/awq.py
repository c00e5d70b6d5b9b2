"""AWQ's files (version "gemm"): whole numbers of 4 bits packed along outputs, which take turns inside a word.

    qweight I32 [I, O / 8], qzeros I32 [C, O / 8], scales F16 [C, O]

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, W words, R some of the outputs.
"""

import numpy as np

from jaxpaged.params.formats.packing import check_words, middle_of, turned
from jaxpaged.params.formats.stored_weight import (
    ALL,
    Rows,
    StoredWeight,
    checked_scales,
    group_size,
    num_rows_of,
    row_ranges,
)

BITS, PER_WORD = 4, 8
OUTPUT_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's outputs each of its fields is, lowest bits first."""


def awq(qweight_IW: np.ndarray, scales_CO: np.ndarray, qzeros_CW: np.ndarray, *, rows: Rows = ALL) -> StoredWeight:
    """Outputs `rows` of a matrix. The tensors are whole: outputs are their last axis, in two of them packed.

    ValueError for tensors that do not fit each other, and for scales that are zero or no number.
    """
    (inputs, words), (groups, outputs) = qweight_IW.shape, scales_CO.shape
    check_words("qweight", qweight_IW.shape, (inputs, outputs // PER_WORD))
    check_words("scales", scales_CO.shape, (groups, words * PER_WORD))
    check_words("qzeros", qzeros_CW.shape, (groups, words))
    group = group_size(inputs, groups, "scales")
    values_RI = outputs_of(qweight_IW, rows)
    zeros_RC = outputs_of(qzeros_CW, rows).astype(np.float32)
    scales_RC = checked_scales(scales_CO[:, rows].T, "scales")
    return StoredWeight(values_RI, scales_RC, zeros_RC if zeros_RC.any() else None, group)


def outputs_of(packed_IW: np.ndarray, rows: Rows) -> np.ndarray:
    """int8 [R, I], less 8, of words in each of which lie eight outputs of one input."""
    wanted = num_rows_of(rows, packed_IW.shape[1] * PER_WORD)
    words = np.unique(wanted // PER_WORD)
    first, last = (int(words[0]), int(words[-1]) + 1) if len(words) else (0, 0)
    fields = np.empty((last - first, PER_WORD, len(packed_IW)), np.uint8)
    words_WI = turned(packed_IW[:, first:last]).view(np.uint32)
    for some in row_ranges(*words_WI.shape):
        for high in (0, 1):
            halves = (words_WI[some] >> np.uint32(4 * high) & np.uint32(0x0F0F0F0F))[..., None].view(np.uint8)
            halves -= np.uint8(middle_of(BITS))
            for byte in range(4):
                fields[some, OUTPUT_OF_FIELD[2 * byte + high]] = halves[..., byte]
    whole = fields.reshape(-1, len(packed_IW)).view(np.int8)
    own_rows = wanted - first * PER_WORD
    if np.array_equal(own_rows, np.arange(len(whole))):
        return whole
    return whole[own_rows]
