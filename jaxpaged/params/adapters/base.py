"""The base's own weights on the host, one at a time, where an adapter needs them: for norms, and beside copies.

They are those of the checkpoint, decoded where it is quantised. Knows files and letters, and no adapters.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params import orbax_format
from jaxpaged.params.checkpoint import entries_of_folder
from jaxpaged.params.expected import stored_tensors
from jaxpaged.params.placing import own_matrices, own_part
from jaxpaged.params.safetensors_reader import TensorEntry
from jaxpaged.params.spec import Spec


class BaseWeights:
    """Of a checkpoint's folder, which was found to fit the specs. Files are opened when a weight is asked for."""

    def __init__(self, folder: Path, specs: Any, config: Any):
        self._folder, self._specs, self._sizes = folder, specs, config.dim_sizes()

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        return entries_of_folder(self._folder)

    def __call__(self, spec: Spec) -> np.ndarray:
        """A parameter in float32, in its own axes. Raises CheckpointError for files that are damaged or gone."""
        shape = [self._sizes[letter] for letter in spec.stored_dims]
        if orbax_format.is_orbax(self._folder):
            return self._of_orbax(spec)
        if spec.scheme is not None:
            found = own_matrices(spec, self._entries, self._sizes)
            return np.stack([matrix.dequantized(np.float32) for matrix in found]).reshape(shape)
        if missing := [name for name in spec.tensor_names(self._sizes) if name not in self._entries]:
            raise CheckpointError(f"{self._folder} has no {missing[0]} any more, which the adapter needs. Restart.")
        with stored_tensors(spec, self._entries, self._sizes) as stored:
            part = own_part(spec, stored, self._sizes)
            if isinstance(part, np.ndarray):
                return part.astype(np.float32)
            return np.stack([each.astype(np.float32) for each in part]).reshape(shape)

    def _of_orbax(self, spec: Spec) -> np.ndarray:
        names = dict(zip(jax.tree.leaves(self._specs), orbax_format.names_of(self._specs), strict=True))
        return orbax_format.read_array(self._folder, names[spec])
