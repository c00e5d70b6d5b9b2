"""A matrix of weights as a file keeps it: numbers of few bits, and what makes weights of them.

All formats here decode to it, and loss is none: a weight is (value - zero) * scale, where zero and scale are those of
its group, some neighbouring inputs of one output. Knows numbers only.

Letters: O outputs and I inputs of a matrix, C groups of an output's inputs, R some of the outputs.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Rows = slice | np.ndarray
"""Some outputs of a matrix: a range of them, or their numbers."""
ALL = slice(None)

WORKED_ON = 2**17
"""Weights that are worked on at a time: they and their copies stay in a core's cache."""


@dataclass(frozen=True)
class StoredWeight:
    """A matrix [O, I].

    `values` [O, I] are int8, float8_e4m3fn or float8_e5m2; numbers of 4 bits are in one of these, exactly. `scales`
    [O, C] are float32, one for every `group` inputs; the last group may be smaller. `zeros` float32 [O, C]; None: all
    are 0.

    `order` [I]: column j of `values` is input order[j], so that groups are neighbours; None: they are already.
    `minima` float32 [O, C]: zeros * scales as the file has them, where it has those; None elsewhere. Zeros made of them
    are rounded. `shift`: what was taken off values and zeros, of which minima know nothing.

    Of weights that nobody quantised, which only have another order in the file, `values` are floats and scales 1.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    group: int
    order: np.ndarray | None = None
    minima: np.ndarray | None = None
    shift: int = 0

    def __post_init__(self) -> None:
        (outputs, inputs), groups = self.values.shape, self.scales.shape
        assert groups == (outputs, -(-inputs // self.group)), f"scales of {groups} for {outputs, inputs}"
        assert all(a is None or (a.shape == groups and a.dtype == np.float32) for a in (self.zeros, self.minima))
        assert self.order is None or (self.order.shape == (inputs,) and inputs % self.group == 0)

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        return self.values.shape

    def dequantized(self, dtype: Any) -> np.ndarray:
        """The weights [O, I] with inputs in the model's order: in float32, rounded once to `dtype`."""
        outputs, inputs = self.shape
        back = None if self.order is None else np.argsort(self.order)
        out_OI = np.empty((outputs, inputs), dtype)
        for rows in row_ranges(outputs, inputs):
            weight_RI = as_float32(self.values[rows])
            if self.minima is not None:
                weight_RI += np.float32(self.shift)
                weight_RI *= self._spread(self.scales[rows])
                weight_RI -= self._spread(self.minima[rows])
            else:
                if self.zeros is not None:
                    weight_RI -= self._spread(self.zeros[rows])
                weight_RI *= self._spread(self.scales[rows])
            out_OI[rows] = weight_RI if back is None else np.take(weight_RI, back, axis=1)
        return out_OI

    def _spread(self, of_group_RC: np.ndarray) -> np.ndarray:
        """What every input has of its group: [R, I], or [R, 1] where there is one group."""
        if of_group_RC.shape[1] == 1:
            return of_group_RC
        return np.repeat(of_group_RC, self.group, axis=1)[:, : self.shape[1]]


def row_ranges(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Rows, some at a time: `WORKED_ON` numbers or one row."""
    step = max(1, WORKED_ON // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def as_float32(values: np.ndarray) -> np.ndarray:
    """A float32 copy. 8-bit floats are looked up two at a time, many times as fast as converted."""
    if values.dtype not in EIGHT_BITS:
        return values.astype(np.float32)
    columns = values.shape[-1]
    raw = np.ascontiguousarray(values).view(np.uint8)
    if columns % 2:
        return floats_of_bytes(values.dtype)[raw]
    return np.take(floats_of_pairs(values.dtype), raw.view(np.uint16), mode="clip").view(np.float32)


@functools.cache
def floats_of_bytes(dtype: np.dtype) -> np.ndarray:
    """[256]: the float32 that each byte of an 8-bit float is."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


@functools.cache
def floats_of_pairs(dtype: np.dtype) -> np.ndarray:
    """[65536]: the two float32 that two bytes of an 8-bit float are, as one number of 64 bits."""
    pair, floats = np.arange(2**16), floats_of_bytes(dtype)
    return np.stack([floats[pair & 255], floats[pair >> 8]], axis=-1).view(np.uint64)[:, 0]


def checked_scales(scales: np.ndarray, name: str) -> np.ndarray:
    """Scales in float32. ValueError where one is zero, infinite or no number."""
    floats = np.asarray(scales).astype(np.float32)
    wrong = ~(np.isfinite(floats) & (floats != 0))
    if wrong.any():
        first = np.unravel_index(np.argmax(wrong), floats.shape)
        place = list(map(int, first))
        raise ValueError(f"{name}{place} is {floats[first]}, and {int(wrong.sum())} of {wrong.size} are like it")
    return floats


def powers_of_two(exponents: np.ndarray, name: str) -> np.ndarray:
    """float32 2^(byte - 127) of exponents as bytes, U8 or E8M0. ValueError for 255, which is no number."""
    exponents = exponents.view(np.uint8)
    wrong = exponents == NOT_A_NUMBER
    if wrong.any():
        place = list(map(int, np.unravel_index(np.argmax(wrong), wrong.shape)))
        raise ValueError(f"{name}{place} is 255, which stands for no number, and so are {int(wrong.sum())} in all")
    return POWERS[exponents]


NOT_A_NUMBER = 255
POWERS = np.ldexp(np.float32(1), np.arange(NOT_A_NUMBER) - 127)
EIGHT_BITS = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))


def num_rows_of(rows: Rows, outputs: int) -> np.ndarray:
    """The numbers of the outputs that `rows` names."""
    return np.arange(outputs)[rows]


def scales_of_rows(scales: np.ndarray, outputs: int, rows: Rows, name: str) -> np.ndarray:
    """float32 [R, C] of the scale of a whole tensor ([] or [1]), one per output ([O] or [O, 1]) or per group [O, C].

    Raises ValueError for another shape, and what `checked_scales` does.
    """
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if scales.ndim != 2 or len(scales) not in (1, outputs):
        raise ValueError(f"{name} has shape {scales.shape}, which fits no {outputs} outputs")
    if len(scales) == 1 != outputs:
        scales = np.broadcast_to(scales, (outputs, scales.shape[1]))
    return checked_scales(scales[rows], name)


def group_size(inputs: int, groups: int, name: str) -> int:
    """Inputs that share a scale. ValueError unless the groups are of one size."""
    if groups == 0 or inputs % groups:
        raise ValueError(f"{name} has {groups} groups of an output, into which {inputs} inputs do not divide")
    return inputs // groups
