"""Encoded weights -> the arrays of the form that a device has them in, some rows at a time, and how much that rounds.

A form that has all numbers of a weight gets them as they are. Others are rounded, to whole numbers or to 8-bit floats
with one scale for an output. Knows neither files nor letters.

Letters: I inputs and O outputs of a matrix, C groups of an output's inputs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.encoded import EncodedMatrix
from jaxpaged.params.formats.float4 import E2M1, e2m1_of
from jaxpaged.params.formats.stored_weight import StoredWeight
from jaxpaged.params.quantized import LARGEST, ZERO, Stored, float_rows, in_bytes, in_words, rounded_rows


class Losses:
    """How far weights were rounded, of those that were: of each the first rows are looked at."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], np.ndarray] = {}

    def add(self, title: str, form: str, error: np.ndarray | None, weight: np.ndarray | None) -> None:
        """Of a matrix; None: nothing was rounded."""
        sums = self._sums.setdefault((title, form), np.zeros(3))
        sums += (1, 0, 0) if error is None or weight is None else (1, square_sum(error), square_sum(weight))

    def __iter__(self) -> Iterator[tuple[str, str, int, float]]:
        """(scheme, form, number of matrices, rms of what rounding changed over that of weights)."""
        for (title, form), (count, error, weight) in self._sums.items():
            yield title, form, int(count), float(np.sqrt(error / weight)) if weight else 0.0

    def in_words(self) -> str:
        """`112 matrices in GPTQ of 4 bits in groups of 128 became rows of int8, rounded by 0.008 of their rms`."""
        return "; ".join(
            f"{count} matrices in {title} became {form}, {f'rounded by {loss:.4f} of their rms' if loss else 'exactly'}"
            for title, form, count, loss in self
        )


def square_sum(x: np.ndarray) -> float:
    return float(np.vdot(x, x))


def rows_of(matrix: EncodedMatrix, dtype: str, losses: Losses, out: tuple[np.ndarray, np.ndarray]) -> None:
    """Fill `out`: values [O, I] of a type, and float32 scales [O]."""
    values_OI, scales_O = out
    looked_at = list[tuple[np.ndarray, np.ndarray]]()

    def take(part: slice, stored: StoredWeight) -> None:
        exact = exact_rows(stored, dtype)
        if exact is not None:
            values_OI[part], scales_O[part] = exact
            return
        weight_OI = stored.dequantized(np.float32)
        values, scales = rounded_rows(weight_OI, np) if dtype == "int8" else float_rows(weight_OI, dtype)
        values_OI[part], scales_O[part] = values, scales
        if part.start == 0:
            looked_at.append((values_OI[part].astype(np.float32) * scales[:, None] - weight_OI, weight_OI))

    matrix.each_part(take)
    losses.add(matrix.scheme.title, in_words(dtype), *(looked_at[0] if looked_at else (None, None)))


def exact_rows(stored: StoredWeight, dtype: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(values, scales) as they are, where there is one scale for an output and the type has the values."""
    if stored.scales.shape[1] != 1 or stored.minima is not None:
        return None
    values, scales = stored.values, stored.scales[:, 0]
    if stored.zeros is not None:
        zeros = np.rint(stored.zeros)
        values = values.astype(np.int16) - zeros.astype(np.int16) if values.dtype == np.int8 else None
        if values is None or (zeros != stored.zeros).any():
            return None
    if dtype != "int8":
        return (values, scales) if values.dtype.name == dtype else None
    if values.dtype.kind != "i" or values.min() < -LARGEST or values.max() > LARGEST:
        return None
    return values.astype(np.int8, copy=False), scales


def stored_parts(matrix: EncodedMatrix, form: Stored, losses: Losses) -> tuple[np.ndarray, ...]:
    """(values [O, I], or [O, I / 2] of two to a byte, scales [O, C], zeros [O, C], order [I]). CheckpointError where
    the file has what the form has not."""
    groups = matrix.inputs // form.group
    width = matrix.inputs // (1 + form.is_packed)
    values_OI, scales_OC = (np.empty((len(matrix.rows), n), of) for n, of in ((width, form.values), (groups, "f4")))
    is_float4 = form.values == E2M1
    zeros_OC, order_I = np.zeros_like(scales_OC), np.arange(matrix.inputs, dtype=np.int32)
    orders = dict[int, np.ndarray]()

    def take(part: slice, stored: StoredWeight) -> None:
        if form.is_packed:
            values_OI[part] = in_bytes((stored.values + np.int8(ZERO)).view(np.uint8))
        else:
            values_OI[part] = e2m1_of(stored.values) if is_float4 else stored.values
        scales_OC[part] = np.repeat(stored.scales, groups // stored.scales.shape[1], axis=1)
        if stored.zeros is not None:
            zeros_OC[part] = np.repeat(stored.zeros, groups // stored.zeros.shape[1], axis=1)
        if stored.order is not None:
            orders[part.start] = stored.order.astype(np.int32)
        check_form(matrix, form, stored)

    matrix.each_part(take)
    order_I = orders.get(0, order_I)
    if form.is_packed:
        zeros_OC += ZERO
    losses.add(matrix.scheme.title, in_words(form), None, None)
    return values_OI, scales_OC, zeros_OC, order_I


def check_form(matrix: EncodedMatrix, form: Stored, stored: StoredWeight) -> None:
    """CheckpointError where the file has what the form has not."""
    is_ordered = stored.order is not None and bool((np.diff(stored.order) != 1).any())
    has_zeros = stored.zeros is not None and bool(stored.zeros.any())
    if (is_ordered and not form.has_order) or (has_zeros and not form.has_zeros):
        raise CheckpointError(
            f"{matrix.file.path}: {matrix.file.name} belongs to a weight with inputs in another order, or zeros, of "
            "which config.json says nothing. Start with --quantized-form rows or 16bit."
        )


def check_matrix(matrix: EncodedMatrix, form: Any) -> None:
    """CheckpointError for a matrix that cannot be what `Spec.quantized` says, or stands for weights that are not
    finite."""

    def take(part: slice, stored: StoredWeight) -> None:
        if isinstance(form, Stored):
            check_form(matrix, form, stored)
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(stored.dequantized(np.float32)).all()
        if not is_finite:
            raise CheckpointError(
                f"{matrix.file.path}: {matrix.file.name} belongs to a weight in {matrix.scheme.title} that is not "
                "finite: its values times their scales are too large. Send it again."
            )

    matrix.each_part(take)
