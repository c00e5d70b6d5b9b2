"""Classifiers of adapters: what makes scores of a vector is small, so that each adapter has all of its own.

Factors of its matrices are added to the checkpoint's, and stand beside matrices that were trained as a whole. Knows no
devices.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.adapters.adapter import Adapter
from jaxpaged.params.adapters.matrices import product
from jaxpaged.params.adapters.targets import OF_SCORES, targets_of
from jaxpaged.params.spec import Spec


def with_whole_scores(adapter: Adapter, specs: Any, base_weight: Callable[[Spec], np.ndarray] | None) -> Adapter:
    """The adapter, with no factors of what makes scores, but whole matrices. Raises CheckpointError where there are no
    weights of the base to add them to."""
    own = {path: weights for path, weights in adapter.weights.items() if OF_SCORES.match(path)}
    if not own:
        return adapter
    if base_weight is None:
        raise CheckpointError(
            "the adapter has factors of the classifier, which are added to the base's weights, but there are no files "
            "of these. Load the model with its weights."
        )
    leaves = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(specs)[0]}
    targets, replaced = targets_of(specs), dict(adapter.replaced)
    for path, weights in own.items():
        target = targets[path]
        leaf = path if path in leaves else f"{path}.weight"
        floats = replace(weights, a=weights.a.astype(np.float32), b=weights.b.astype(np.float32))
        whole = replaced.get(leaf, base_weight(target.spec)) + product(floats, target)
        if weights.magnitude is not None:
            inputs = whole.ndim - weights.magnitude.ndim
            whole = whole * weights.magnitude.reshape(weights.magnitude.shape + (1,) * inputs)
        replaced[leaf] = whole.astype(np.float32)
    others = {path: weights for path, weights in adapter.weights.items() if path not in own}
    return replace(adapter, weights=others, replaced=replaced, has_merged=True)
