"""A model with an adapter in its weights, as a checkpoint of its own: safetensors that any engine loads.

Names, files and types are those of the base; what an adapter changes is added up in float32. A head that was the table
of embeddings becomes one of its own where the adapter changes one of the two. Knows letters and files, and no models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.params import orbax_format
from jaxpaged.params.adapters.adapter import Adapter, AdapterWeights
from jaxpaged.params.adapters.base import BaseWeights
from jaxpaged.params.adapters.reading import read_adapter
from jaxpaged.params.adapters.targets import EMBEDDING, TIED_HEAD, Target, targets_of
from jaxpaged.params.checkpoint import check_folder
from jaxpaged.params.derived_folder import write_derived
from jaxpaged.params.gguf_folder.places_file import is_gguf_folder
from jaxpaged.params.placing import own_part
from jaxpaged.params.safetensors_reader import ALL_DTYPES, DTYPES, TensorEntry, mapped
from jaxpaged.params.safetensors_writer import header_of_file

Sizes = Mapping[str, int]
OWN_HEAD = f"{TIED_HEAD}.weight"


@dataclass(frozen=True)
class Change:
    """What an adapter does to a part of one tensor; `expert`: its number, where each has a tensor of its own."""

    target: Target
    weights: AdapterWeights
    expert: int | None = None

    def apply(self, whole: np.ndarray, sizes: Sizes) -> None:
        """Change its part of a tensor of the checkpoint, in place."""
        spec, a, b, magnitude = self.target.spec, self.weights.a, self.weights.b, self.weights.magnitude
        if self.expert is None:
            own = own_part(spec, [whole], sizes)
        else:
            own, a, b = whole.reshape([sizes[letter] for letter in spec.dims[1:]]), a[self.expert], b[self.expert]
            magnitude = None if magnitude is None else magnitude[self.expert]
        assert isinstance(own, np.ndarray) and np.shares_memory(own, whole), f"{spec} is a copy"
        if self.target.is_experts and self.expert is None:
            for each, b_of_one, a_of_one in zip(own, b, a, strict=True):
                each += np.tensordot(b_of_one, a_of_one, 1)
        else:
            own += np.tensordot(b, a, 1)
        if magnitude is not None:
            is_table = self.target.kind == EMBEDDING
            own *= magnitude if is_table else magnitude.reshape(magnitude.shape + (1,) * (own.ndim - magnitude.ndim))


@dataclass(frozen=True)
class Changes:
    """Name of a tensor, as a text model has it -> what is done to it. `replaced`: -> what stands in its place."""

    changed: Mapping[str, list[Change]]
    replaced: Mapping[str, np.ndarray]

    def __contains__(self, name: str) -> bool:
        return name in self.changed or name in self.replaced


def write_merged(
    specs: Any,
    config: Any,
    folder: Path,
    adapter_folder: Path,
    out_folder: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model of `folder` with an adapter in it to a new folder.

    Raises UsageError for a model in a form that nothing can be added to, and when `out_folder` holds something or
    cannot be made; CheckpointError for files of either that are damaged, or an adapter that is not this model's.
    """
    refuse_other_forms(config, folder)
    check_folder(specs, config, folder)
    base_weight = BaseWeights(folder, specs, config)
    adapter = read_adapter(adapter_folder, specs, config, dtype=np.float32, base_weight=base_weight, may_replace=True)
    sizes, targets = config.dim_sizes(), targets_of(specs)
    changes = changes_by(adapter, specs, targets, sizes)
    tables = [target.spec.hf_name for target in targets.values() if target.is_tied]  # that are heads too
    unties = bool(tables) and any(name in changes for name in (OWN_HEAD, *tables))

    def write_file(path: Path, entries: Mapping[str, TensorEntry]) -> Iterable[str]:
        own = with_own_head(entries, tables) if unties else entries
        return write_tensors(path, own, changes, sizes)

    write_derived(folder, out_folder, write_file, untied if unties else lambda hf: hf, progress)


def refuse_other_forms(config: Any, folder: Path) -> None:
    """UsageError for a base whose files are not the weights themselves."""
    if config.quantization is not None or is_gguf_folder(folder):
        raise UsageError(
            f"{folder} is quantised, and what an adapter adds would be rounded away. Name the 16-bit model that it was "
            "made of, and round the merged one with `jaxpaged convert --scheme`; or serve the adapter beside the model."
        )
    if orbax_format.is_orbax(folder):
        raise UsageError(f"{folder} was written by `jaxpaged convert`. Name the folder that it was made of.")


def changes_by(adapter: Adapter, specs: Any, targets: Mapping[str, Target], sizes: Sizes) -> Changes:
    """What an adapter does, by tensors of the checkpoint."""
    changed: dict[str, list[Change]] = {}
    for path, weights in adapter.weights.items():
        target = targets[path]
        names = [OWN_HEAD] if target.is_tied else target.spec.tensor_names(sizes)
        for i, name in enumerate(names):
            changed.setdefault(name, []).append(Change(target, weights, i if target.spec.is_stacked else None))
    leaves = {jax.tree_util.keystr(path): spec for path, spec in jax.tree_util.tree_flatten_with_path(specs)[0]}
    return Changes(changed, {leaves[path].hf_name: whole for path, whole in adapter.replaced.items()})


def with_own_head(entries: Mapping[str, TensorEntry], tables: Sequence[str]) -> dict[str, TensorEntry]:
    """The tensors of a file, with a head beside the table of embeddings, if that is here."""
    table = next((name for name in tables if name in entries), None)
    others = {name: entry for name, entry in entries.items() if name != OWN_HEAD}
    return others if table is None else {**others, OWN_HEAD: entries[table]}


def untied(hf: dict[str, Any]) -> dict[str, Any]:
    """config.json of a model whose head is one of its own."""
    text = hf.get("text_config")
    inner = {"text_config": {**text, "tie_word_embeddings": False}} if isinstance(text, dict) else {}
    return {**hf, **inner, "tie_word_embeddings": False}


def write_tensors(path: Path, own: Mapping[str, TensorEntry], changes: Changes, sizes: Sizes) -> Iterable[str]:
    """Write a file with these tensors, one at a time; their names there."""
    names = {name: OWN_HEAD if name == OWN_HEAD else entry.name for name, entry in own.items()}
    with path.open("wb") as file:
        file.write(header_of_file({names[name]: (ALL_DTYPES[each.dtype], each.shape) for name, each in own.items()}))
        for name, entry in own.items():
            with mapped(entry, ALL_DTYPES) as stored:
                tensor = merged(name, entry, stored, changes, sizes) if name in changes else stored
                file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
    return names.values()


def merged(name: str, entry: TensorEntry, stored: np.ndarray, changes: Changes, sizes: Sizes) -> np.ndarray:
    """A tensor with what the adapter does to it, in its own type. CheckpointError for numbers that it cannot hold."""
    assert entry.dtype in DTYPES, f"{name} is no weight"
    whole = changes.replaced[name] if name in changes.replaced else stored.astype(np.float32)
    for change in changes.changed.get(name, ()):
        change.apply(whole, sizes)
    with np.errstate(over="ignore"):
        found = whole.astype(stored.dtype)
    if not np.isfinite(found).all():
        raise CheckpointError(
            f"{entry.path}: {entry.name} would have numbers with the adapter that {entry.dtype} cannot hold. Convert "
            "the base to bfloat16 or float32 first."
        )
    return found
