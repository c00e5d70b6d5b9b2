"""An adapter as it has been read: for each matrix of the model that it changes, the two factors of the change.

Arrays have the axes of the model's own parameters (`Spec.dims`) in the checkpoint's sizes, so they are placed and split
as weights are. Nothing here knows files or devices.

Letters: P numbers of a rank. It stands first in what reads inputs, and last in what writes outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class AdapterWeights:
    """W + b @ a in place of the weight W of one `Linear` or table.

    `a` [P, inputs...], `b` [outputs..., P] with the adapter's scaling in it, axes as `Target` names them. Experts have
    theirs, E, before all others: `a` [E, P, inputs...], `b` [E, outputs..., P]. A table [V, D] is a matrix with outputs
    V and inputs D, also where it is an embedding: `a` [P, D], `b` [V, P].

    `magnitude` (DoRA): what the sum (W + b @ a) x, without the bias, is multiplied by: [outputs...] or [E, outputs...],
    of an embedding [D]. It is the trained magnitude over the norm of W + b @ a, float32.
    """

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None

    @property
    def rank(self) -> int:
        """P."""
        return self.b.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.magnitude is None else self.magnitude.nbytes)


@dataclass(frozen=True)
class Adapter:
    """What a folder holds.

    `weights`: path of a `Target` -> its factors. `replaced`: path of a target -> the whole matrix [outputs...,
    inputs...] that stands in its place, or its vector, which only a classifier may have. `digest`: sha256, in hex, of
    the bytes of both files. `rank`: the largest. `num_tensors`: how many the file has, all of which are used.
    `has_merged`: what replaces a matrix is the checkpoint's own with factors added.
    """

    digest: str
    rank: int
    num_tensors: int
    weights: Mapping[str, AdapterWeights]
    replaced: Mapping[str, np.ndarray] = field(default_factory=dict)
    has_merged: bool = False

    @property
    def num_bytes(self) -> int:
        """Of host memory."""
        return sum(each.nbytes for each in (*self.weights.values(), *self.replaced.values()))
