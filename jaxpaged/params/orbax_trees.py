"""Weights from orbax checkpoints, on the host: trees of frameworks, and folders that `jaxpaged convert` wrote.

Knows orbax and letters, and neither frameworks nor engines.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.orbax_format import ARRAYS, names_of
from jaxpaged.params.spec import Spec

INSIDE = ("items", "default", "model_params", "state")
"""Folders in which trainers keep the arrays of a step."""
PARAMS = "params"
"""What a trainer's whole state calls the weights."""


def is_tree(folder: Path) -> bool:
    """Whether orbax wrote a tree there."""
    return any((folder / name).exists() for name in ("_METADATA", "manifest.ocdbt"))


def read_tree(path: Path) -> Mapping[str, Any]:
    """The weights of a checkpoint, as arrays of numpy; of a trainer's state nothing else is read. Raises
    CheckpointError."""
    import orbax.checkpoint as ocp

    folder = next((each for each in (path, *(path / name for name in INSIDE)) if is_tree(each)), None)
    if folder is None:
        raise CheckpointError(f"{path} is no checkpoint of orbax. Name the folder of one step.")
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.metadata(folder.absolute()).item_metadata
            tree = found.tree
            wanted = {PARAMS: tree[PARAMS]} if isinstance(tree, Mapping) and PARAMS in tree else tree
            numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
            args = ocp.args.PyTreeRestore(wanted, numpy, partial_restore=True)
            return checkpointer.restore(folder.absolute(), args=args)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Write the checkpoint again.") from error


def read_converted(folder: Path, specs: Any, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The weights of a folder that `jaxpaged convert` wrote, by the names of the checkpoint that it was made of. Raises
    CheckpointError."""
    arrays = read_tree(folder / ARRAYS)
    found: dict[str, np.ndarray] = {}
    for path, spec in zip(names_of(specs), jax.tree.leaves(specs), strict=True):
        if path not in arrays:
            raise CheckpointError(f"{folder / ARRAYS} has no array {path}. Is it of this model?")
        found |= dict(tensors_of(spec, arrays[path], sizes))
    if left := sorted(arrays.keys() - set(names_of(specs))):
        raise CheckpointError(f"{folder / ARRAYS} has the array {left[0]}, which the model has not.")
    return found


def tensors_of(spec: Spec, array: np.ndarray, sizes: Mapping[str, int]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a parameter is in a checkpoint. Raises CheckpointError."""
    if spec.fused or spec.transposed:
        raise CheckpointError(
            f"{spec.hf_name} holds several parameters in the checkpoint, and cannot be made of orbax's. Send the "
            "original checkpoint's files."
        )
    shape = tuple(sizes[letter] for letter in spec.stored_dims)
    if array.shape != shape:
        raise CheckpointError(f"the array of {spec.hf_name} has shape {array.shape}, but the model makes it {shape}.")
    groups = spec.hf_dims.split(" ")[1 if spec.is_stacked else 0 :]
    tensor = tuple(int(np.prod([sizes[each] for each in group if each != "1"])) for group in groups)
    pieces = list(array) if spec.is_stacked else [array]
    for name, piece in zip(spec.tensor_names(sizes), pieces, strict=True):
        yield name, piece.reshape(tensor)
