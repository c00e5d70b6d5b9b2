"""Weights that come under way, part by part: all of them are checked before the first one is used.

They have the checkpoint's names, types and shapes, as arrays or in safetensors files. A model whose weights are rounded
when they are loaded rounds what arrives in the same way. Knows letters and files; what a model is comes in as specs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged.errors import CheckpointError, UsageError, did_you_mean
from jaxpaged.params.checkpoint import canonical_name, every_entry
from jaxpaged.params.expected import Expected, check_entry, dtypes_of, expected_of, stored_tensors
from jaxpaged.params.placing import place
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.safetensors_reader import HeldTensor, TensorEntry, mapped, read_header
from jaxpaged.params.safetensors_writer import NAMES
from jaxpaged.params.spec import Spec
from jaxpaged.params.unused import check_unused

GIVEN = Path("update_weights")
"""Stands for a file in errors about arrays."""
PIECE = 1 << 22
"""Numbers that are looked at together."""


@dataclass(frozen=True)
class Model:
    """What weights are for: specs, and the config that has the sizes of their axes."""

    specs: Any
    config: Any


class ArrivingWeights:
    """The parts of one update. `models`: those of all stages. `is_partial`: what does not come stays as it is."""

    def __init__(self, models: Sequence[Model], is_partial: bool = False):
        specs = [(spec, model.config.dim_sizes()) for model in models for spec in jax.tree.leaves(model.specs)]
        if encoded := next((spec for spec, _ in specs if spec.scheme is not None), None):
            raise UsageError(
                f"the model's checkpoint is quantised ({encoded.scheme.title}), and its weights cannot be updated. "
                "Load the 16-bit model, with the option quantization if it is to have fewer bits."
            )
        self._wanted = {each.names[0]: each for each in chain.from_iterable(expected_of(*spec) for spec in specs)}
        self._names = {spec: spec.tensor_names(sizes) for spec, sizes in specs}
        self._config = models[-1].config
        self.is_partial = is_partial
        self.entries: dict[str, TensorEntry] = {}

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    def add_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Arrays of numpy or JAX by the checkpoint's names. They are copied when the update is finished, and must not
        change before. Raises CheckpointError, and nothing is added."""
        for name, array in arrays.items():
            if isinstance(array, jax.Array) and array.is_deleted():
                raise CheckpointError(f"{name} was deleted: a program that it was donated to has its memory.")
        held = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in held.items():
            if array.dtype not in NAMES:
                raise CheckpointError(f"{name} has type {array.dtype}; give float32, float16 or bfloat16.")
        self._add(
            HeldTensor(GIVEN, name, NAMES[array.dtype], array.shape, 0, array.nbytes, array)
            for name, array in held.items()
        )

    def add_files(self, path: Path) -> None:
        """A safetensors file, or a folder of them as checkpoints are. It must not change before the update is finished.
        Raises CheckpointError, and nothing is added."""
        self._add(every_entry(path).values() if path.is_dir() else read_header(path))

    def _add(self, entries: Iterable[TensorEntry]) -> None:
        added: dict[str, TensorEntry] = {}
        for entry in entries:
            name = canonical_name(entry.name)
            expected = self._wanted.get(name)
            if expected is None:
                if check_unused([name], {**self.entries, **added, name: entry}, self._config):
                    raise CheckpointError(
                        f"{entry.path}: the model has no weight {entry.name}.{did_you_mean(name, self._wanted)}"
                    )
                continue
            if name in added or name in self.entries:
                raise CheckpointError(f"{entry.path}: {entry.name} comes for the second time in this update.")
            check_entry(entry, expected)
            check_finite(entry, expected)
            added[name] = entry
        self.entries |= added

    def check_complete(self) -> None:
        """CheckpointError unless all weights are there, or, of a part, all tensors of each parameter."""
        missing = [
            name
            for spec, names in self._names.items()
            if not self.is_partial or self.brings(spec)
            for name in names
            if name not in self.entries
        ]
        if missing or not self.entries:
            first = f", the first is {missing[0]}" if missing else ""
            raise CheckpointError(
                f"{len(missing)} of {len(self._wanted)} weights did not come{first}. Send them, or say when the update "
                "starts that it is partial; all tensors of a parameter come together."
            )

    def brings(self, spec: Spec) -> bool:
        """Whether anything of a parameter has come."""
        return any(name in self.entries for name in self._names[spec])

    def placed(self, spec: Spec, model: Model, mesh: Mesh, dtype: Any, rooms: Rooms) -> Any:
        """A parameter of those that came, on its devices."""
        sizes = model.config.dim_sizes()
        with stored_tensors(spec, self.entries, sizes) as stored:
            return place(spec, stored, sizes, mesh, dtype, rooms)


def check_finite(entry: TensorEntry, expected: Expected) -> None:
    """CheckpointError for a weight with NaN or infinity."""
    with mapped(entry, dtypes_of(expected.spec)) as array:
        if array.dtype.kind in "iu":
            return
        line = array.reshape(-1)
        for begin in range(0, math.prod(array.shape), PIECE):
            piece = line[begin : begin + PIECE]
            bad = ~np.isfinite(piece)
            if bad.any():
                place_of_it = np.unravel_index(begin + int(bad.argmax()), array.shape)
                raise CheckpointError(
                    f"{entry.path}: {entry.name} is {float(piece[bad.argmax()])} at {tuple(map(int, place_of_it))}. "
                    "The weights that the engine has stay."
                )
