"""Weights that come under way, part by part: all of them are checked before the first one is used.

They have the checkpoint's names, types and shapes, as arrays or in safetensors files. A model whose weights are rounded
when they are loaded rounds what arrives in the same way. One whose checkpoint is quantised takes tensors like that
one's, which are decoded when they come, to see whether they can be, and 16 bits where it is known how these are rounded
(`rounded_folder.UNDER_WAY`). Knows letters and files; what a model is comes in as specs.
"""

import math
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpaged.config.offer_address import is_offer
from jaxpaged.errors import CheckpointError, UsageError, did_you_mean
from jaxpaged.params.checkpoint import canonical_name, every_entry, further_layers, load_param
from jaxpaged.params.encoded import WEIGHT
from jaxpaged.params.expected import Expected, check_entry, dtypes_of, expected_of
from jaxpaged.params.kv_scales import without_kv_scales
from jaxpaged.params.offered import pulled
from jaxpaged.params.orbax_format import is_orbax
from jaxpaged.params.patches import (
    INDICES,
    VALUES,
    Single,
    WholeRow,
    changed,
    check_half,
    check_length,
    check_pair,
    singles,
    split_name,
)
from jaxpaged.params.placing import own_matrices
from jaxpaged.params.recoding import Losses, check_matrix
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.rounded_folder import UNDER_WAY, MakeTensors, rounded_entry
from jaxpaged.params.safetensors_reader import (
    ALL_DTYPES,
    DTYPES,
    WHOLE_DTYPES,
    HeldTensor,
    TensorEntry,
    mapped,
    read_header,
)
from jaxpaged.params.safetensors_writer import NAMES
from jaxpaged.params.schemes.gguf import Gguf, GgufOfLatents
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


Held = tuple[dict[str, TensorEntry], dict[str, dict[str, TensorEntry]], "dict[Path, FileState | None]"]
"""What has come: tensors, patches, and the files of both."""


class Place(NamedTuple):
    """What a tensor is to a model: its name there, which half of a patch it is or "", and what it must be."""

    name: str
    end: str
    expected: Expected


class ArrivingWeights:
    """The parts of one update. `models`: those of all stages. `is_partial`: what does not come stays as it is."""

    def __init__(self, models: Sequence[Model], is_partial: bool = False):
        self._sizes = {spec: model.config.dim_sizes() for model in models for spec in jax.tree.leaves(model.specs)}
        if any(isinstance(spec.scheme, Gguf | GgufOfLatents) for spec in self._sizes):
            raise UsageError(
                "the model is a GGUF file, of which no weights are updated. Load it from safetensors files, with the "
                "option quantization if it is to have fewer bits."
            )
        self._tensors = {spec: [*map(with_rounded, expected_of(spec, sizes))] for spec, sizes in self._sizes.items()}
        self._wanted = {name: each for each in chain(*self._tensors.values()) for name in each.names}
        self._decoded = defaultdict[str, list[Spec]](list)  # by tensor: what is decoded of it
        self._quantised = dict[str, Spec]()  # by the names that their weights have where nobody quantised them
        for spec, sizes in self._sizes.items():
            if spec.scheme is not None:
                self._quantised |= dict.fromkeys(spec.tensor_names(sizes), spec)
                for name in chain.from_iterable(each.names for each in self._tensors[spec]):
                    self._decoded[name].append(spec)
        self._config, self._models = models[-1].config, models
        self.is_partial = is_partial
        self.entries: dict[str, TensorEntry] = {}
        self._patches: dict[str, dict[str, TensorEntry]] = {}  # by tensor, and by the end of a half's name
        self._files: dict[Path, FileState | None] = {}  # as they were when they came
        self._before: Held | None = None

    @property
    def num_bytes(self) -> int:
        halves = chain.from_iterable(each.values() for each in self._patches.values())
        return sum(entry.num_bytes for entry in chain(self.entries.values(), halves))

    def add(self, parts: Sequence[str] | Mapping[str, Any]) -> None:
        """Arrays by the checkpoint's names, or several of: a file, a folder, the address of an offer. Raises
        CheckpointError, ServerError, and nothing is added."""
        before = self.entries, self._patches, self._files
        self.entries, self._patches, self._files = self.entries.copy(), self._patches.copy(), self._files.copy()
        self.settle()
        try:
            if isinstance(parts, Mapping):
                self._add_arrays(parts)
            else:
                for part in parts:
                    self._add_offered(part) if is_offer(part) else self._add_files(Path(part))
        except BaseException:
            self.entries, self._patches, self._files = before
            raise
        self._before = before

    def settle(self) -> None:
        """What has come can no longer be taken back: something else comes, or is refused."""
        self._before = None

    def take_back(self) -> None:
        """Forget what came last, if it was added: somebody else refused it."""
        if self._before is not None:
            self.entries, self._patches, self._files = self._before
            self._before = None

    def sums_of_last(self) -> dict[str, int]:
        """A sum over the bytes of each tensor that came last: processes that read the same files have the same ones."""
        entries, patches, _ = self._before or (self.entries, self._patches, {})
        new = {name: entry for name, entry in self.entries.items() if name not in entries}
        for name, halves in self._patches.items():
            new |= {name + end: entry for end, entry in halves.items() if end not in patches.get(name, {})}
        return {name: sum_of(entry) for name, entry in new.items()}

    def _add_arrays(self, arrays: Mapping[str, Any]) -> None:
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

    def _add_files(self, path: Path) -> None:
        """A safetensors file, a folder of them as checkpoints are, or one that `jaxpaged convert` wrote. It must not
        change before the update is finished. Raises CheckpointError, and nothing is added."""
        if is_orbax(path):
            self._add_orbax(path)
            return
        entries = list(every_entry(path).values() if path.is_dir() else read_header(path))
        files = {entry.path: state_of(entry.path) for entry in entries}
        self._add(entries)
        self._files |= files

    def _add_orbax(self, path: Path) -> None:
        from jaxpaged.params.orbax_trees import read_converted  # with orbax, which takes two seconds

        if len(self._models) > 1:
            raise CheckpointError(
                f"{path} is in orbax format, and the model is dealt to stages. Send safetensors files."
            )
        [model] = self._models
        self._add_arrays(read_converted(path, model.specs, model.config.dim_sizes()))

    def _add_offered(self, address: str) -> None:
        """What another process offers, and the model has use for. It is pulled if all of it fits. Raises
        CheckpointError, ServerError, and nothing is added."""
        self._add(pulled(address, self._of_use))

    def _of_use(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Those that the model has, whose contents are not here yet. Raises CheckpointError for what does not fit."""
        found: dict[str, TensorEntry] = {}
        before = ChainMap(found, self.entries)
        for entry in entries:
            if (place := self._place_of(entry, before)) is None:
                continue
            if place.end:
                check_length(entry, place.expected)
            else:
                check_entry(entry, place.expected)
            found[entry.name] = entry
        return list(found.values())

    def _place_of(self, entry: TensorEntry, before: Mapping[str, TensorEntry]) -> Place | None:
        """What a tensor is to the model; None: nothing, for a reason. `before`: those that came before it. Raises
        CheckpointError where there is none."""
        tensor, end = split_name(entry.name)
        name = canonical_name(tensor)
        expected = self._wanted.get(name)
        if name in self._quantised:
            self._check_quantised(entry, name, end, expected)
        if expected is not None:
            return Place(name, end, expected)
        if name.startswith(further_layers(self._config)):
            return None
        if not without_kv_scales({name: entry}):
            raise CheckpointError(
                f"{entry.path}: {entry.name} is a scale of what attention caches, which stays as it is. Leave it out."
            )
        if check_unused([name], {**before, name: entry}, self._config):
            raise CheckpointError(
                f"{entry.path}: the model has no weight {entry.name}.{did_you_mean(name, self._wanted)}"
            )
        return None

    def _add(self, entries: Iterable[TensorEntry]) -> None:
        """One after the other; where one raises, `add` takes back those before it."""
        added = list[str]()
        for entry in entries:
            if (place := self._place_of(entry, self.entries)) is None:
                continue
            name, halves = place.name, self._patches.get(place.name, {})
            if place.end in halves or (halves and not place.end) or name in self.entries:
                raise second_time(entry)
            if place.end:
                self._patches[name] = self._with_half(place, halves, entry)
                continue
            check_entry(entry, place.expected)
            for own, tensor in as_stored(name, entry, place.expected).items():
                if self._has(self._wanted[own]):
                    raise second_time(tensor)
                self.entries[own] = tensor
                added.append(own)
        self._check_decoded(added)

    def _check_quantised(self, entry: TensorEntry, name: str, end: str, expected: Expected | None) -> None:
        """CheckpointError for a part of a weight that the checkpoint has quantised, and for one in 16 bits to which
        nothing is rounded."""
        spec = self._quantised[name]
        assert spec.scheme is not None
        if end:
            raise CheckpointError(
                f"{entry.path}: {entry.name} is for a weight that the checkpoint has in {spec.scheme.title}, of which "
                "no part can be replaced. Send all of it."
            )
        if entry.dtype in DTYPES and (expected is None or entry.dtype not in expected.dtypes):
            wanted = [each.names[0] for each in self._tensors[spec] if not each.is_optional]
            own = [each for each in wanted if each.startswith(name.removesuffix(WEIGHT))]
            raise CheckpointError(
                f"{entry.path}: {entry.name} has type {entry.dtype}, but the checkpoint has it in {spec.scheme.title}, "
                f"to which nothing is rounded under way. Send {', '.join(own)}; or load the 16-bit "
                "model, with the option quantization if it is to have fewer bits."
            )

    def _check_decoded(self, added: Iterable[str]) -> None:
        """CheckpointError for parameters that are there, now that some tensors were added, and cannot be decoded."""
        for spec in dict.fromkeys(chain.from_iterable(self._decoded.get(name, ()) for name in added)):
            if self.brings_all(spec):
                for matrix in own_matrices(spec, self.entries, self._sizes[spec]):
                    check_matrix(matrix, spec.quantized)

    def _with_half(self, place: Place, halves: Mapping[str, TensorEntry], entry: TensorEntry) -> dict[str, TensorEntry]:
        """A patch with another half, which is checked."""
        if not self.is_partial:
            raise CheckpointError(f"{entry.path}: {entry.name} is for an update that was begun with is_partial.")
        check_half(entry, place.end, place.expected)
        both = {**halves, place.end: entry}
        if len(both) == 2:
            check_pair(place.name, both, place.expected)
        return both

    def check_complete(self) -> None:
        """CheckpointError unless all weights are there, or, of a part, both halves of what is sparse."""
        if other := next((path for path, state in self._files.items() if state_of(path) != state), None):
            raise CheckpointError(
                f"{other} was changed or removed after it had come. Begin the update once more, and leave its files "
                "alone until it is finished."
            )
        for name, halves in self._patches.items():
            if len(halves) < 2:
                [end] = {INDICES, VALUES} - halves.keys()
                raise CheckpointError(f"{name}{end} did not come. Send it, too.")
        wanted = {each.names[0]: each for each in chain(*self._tensors.values()) if not each.is_optional}
        missing = [] if self.is_partial else [name for name, each in wanted.items() if not self._has(each)]
        if missing or not (self.entries or self._patches):
            first = f", the first is {missing[0]}" if missing else ""
            raise CheckpointError(
                f"{len(missing)} of {len(wanted)} weights did not come{first}. Send them, or say when the update "
                "starts that it is partial."
            )

    def brings(self, spec: Spec) -> bool:
        """Whether anything of a parameter has come."""
        return any(self._has(each) or each.names[0] in self._patches for each in self._tensors[spec])

    def brings_all(self, spec: Spec) -> bool:
        """Whether all of it has."""
        return all(each.is_optional or self._has(each) for each in self._tensors[spec])

    def _has(self, expected: Expected) -> bool:
        return any(name in self.entries for name in expected.names)

    def changed(self, spec: Spec, before: jax.Array) -> jax.Array:
        """A parameter of which parts came, with them."""
        changes = list[WholeRow | Single]()
        shape = tuple(self._sizes[spec][each] for each in spec.stored_dims)
        for number, name in enumerate(spec.tensor_names(self._sizes[spec])):
            if name in self.entries:
                with mapped(self.entries[name], dtypes_of(spec)) as array:
                    changes.append(WholeRow(number, np.array(array).reshape(before.shape[1:])))
            elif name in self._patches:
                halves, first = self._patches[name], number if spec.is_stacked else None
                with mapped(halves[INDICES], WHOLE_DTYPES) as indices, mapped(halves[VALUES], DTYPES) as values:
                    changes.append(singles(shape, first, np.array(indices), np.array(values)))
        return changed(before, changes)

    def placed(self, spec: Spec, model: Model, mesh: Mesh, dtype: Any, rooms: Rooms) -> Any:
        """A parameter of those that came, on its devices."""
        return load_param(spec, self.entries, model.config.dim_sizes(), mesh, dtype, rooms, Losses())


def rounding_of(expected: Expected) -> MakeTensors | None:
    """What rounds a tensor that may come in 16 bits where the checkpoint has fewer; None: it may not."""
    scheme = expected.spec.scheme
    return UNDER_WAY.get(scheme) if scheme is not None and expected.names[0].endswith(f".{WEIGHT}") else None


def with_rounded(expected: Expected) -> Expected:
    """A tensor with the types of which it is rounded."""
    return replace(expected, dtypes=(*expected.dtypes, *DTYPES)) if rounding_of(expected) else expected


def as_stored(name: str, entry: TensorEntry, expected: Expected) -> dict[str, TensorEntry]:
    """A tensor as the checkpoint has it: several by their names, in memory, if it is rounded. CheckpointError for a
    weight with NaN or infinity; what is decoded is looked at when all of it is there."""
    rounding = rounding_of(expected) if entry.dtype in DTYPES else None
    if rounding or expected.spec.scheme is None:
        check_finite(entry, expected)
    rounded = rounded_entry(entry, rounding) if rounding else None
    if rounded is None:
        return {name: entry}
    held = lambda end, array: HeldTensor(
        entry.path, entry.name.removesuffix(WEIGHT) + end, NAMES[array.dtype], array.shape, 0, array.nbytes, array
    )
    return {name.removesuffix(WEIGHT) + end: held(end, array) for end, array in rounded.items()}


def second_time(entry: TensorEntry) -> CheckpointError:
    return CheckpointError(f"{entry.path}: {entry.name} comes for the second time in this update.")


FileState = tuple[int, int, int]
"""Number, size and time of the last change of a file."""


def state_of(path: Path) -> FileState | None:
    """How a file is now; None: it cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def sum_of(entry: TensorEntry) -> int:
    """Of the words of 8 bytes of a tensor, which takes no longer than reading it."""
    with mapped(entry, ALL_DTYPES) as array:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = len(data) // 8 * 8
        words = int(data[:whole].view(np.uint64).sum())
        return (words + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


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
