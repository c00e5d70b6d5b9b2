"""Magnitudes (DoRA, arXiv 2402.09353): what outputs are multiplied by, from trained magnitudes and norms of rows.

W' = m (W + b a) / |W + b a|, where norms are those of what an output is made of. So outputs of the sum are multiplied
by m over the norm, which is a number for each output that does not depend on tokens: it is computed once, when an
adapter is read.
"""

from collections.abc import Mapping

import numpy as np

from jaxpaged.params.adapters.adapter import AdapterWeights
from jaxpaged.params.adapters.matrices import Factors, product
from jaxpaged.params.adapters.targets import EMBEDDING, Target


def scaled_magnitude(
    target: Target, weights: AdapterWeights, pieces: Mapping[int | None, Factors], base: np.ndarray
) -> np.ndarray:
    """Float32, in the axes of `AdapterWeights.magnitude`. `base` is W in the target's axes. Experts that the adapter
    leaves out are multiplied by 1."""
    changed = base + product(weights, target)
    if target.kind == EMBEDDING:  # of a table, an output is a column
        return pieces[None].magnitude / norms(changed.T)
    if not target.is_experts:
        of_rows = norms(changed.reshape(-1, weights.a[0].size))
        return (pieces[None].magnitude / of_rows).reshape(weights.b.shape[:-1])
    found = np.ones(weights.b.shape[:-1], np.float32)
    for expert, piece in pieces.items():
        found[expert] = piece.magnitude / norms(changed[expert].reshape(len(piece.b), -1))
    return found


def norms(rows: np.ndarray) -> np.ndarray:
    """Of each row; the smallest normal number where there is nothing."""
    return np.maximum(np.linalg.norm(rows.astype(np.float32), axis=1), np.finfo(np.float32).tiny)
