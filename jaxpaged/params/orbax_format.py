"""Checkpoints in orbax format, as `jaxpaged convert` writes them: the parameters as the model uses them.

Loading renames and transposes nothing. Arrays keep the sizes of the original checkpoint (key heads once each, no
padded vocabulary), so one checkpoint loads onto any mesh. Beside the arrays, the folder has config.json, tokenizer
and generation settings, so that it is a `--model` by itself. Knows letters and orbax, and no model.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpaged.errors import CheckpointError, UsageError
from jaxpaged.params.gguf_folder.places_file import PLACES
from jaxpaged.params.mistral_folder import MISTRAL_INDEX, description_of
from jaxpaged.params.other_formats import PARAMS
from jaxpaged.params.placing import place_part
from jaxpaged.params.quantized import is_quantized
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.schemes.reading import BESIDE, without_description
from jaxpaged.params.sharding import param_shapes
from jaxpaged.params.spec import Spec

ARRAYS = "orbax"
"""The folder inside the checkpoint's folder that orbax owns."""

TOWER, BESIDE_TOWER = "vision.", "decoder."
"""How the paths of a tower's parameters begin, and those of a decoder that has one beside it."""

BYTES_AT_ONCE = 2**30
"""That are read between two words of progress: orbax says nothing before all that it was asked for is there."""

SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""What is copied along: configuration, tokenizer, chat template."""


def is_orbax(folder: Path) -> bool:
    """Whether the folder holds a checkpoint of this format."""
    return (folder / ARRAYS).is_dir()


def save_orbax(specs: Any, config: Any, params: Any, model_folder: str | Path, out_folder: str | Path) -> None:
    """Write parameters that were loaded on one device, and the side files of `model_folder`, to a new folder.

    Raises UsageError when `out_folder` holds something already or cannot be made, or the parameters were padded for
    several devices.
    """
    import orbax.checkpoint as ocp  # takes two seconds to import, which only this format should cost

    model_folder, out_folder = Path(model_folder), Path(out_folder)
    arrays = dict(zip(names_of(specs), jax.tree.leaves(params), strict=True))
    shapes = stored_shapes(specs, config.dim_sizes())
    padded = [name for name, array in arrays.items() if array.shape != shapes[name]]
    if padded:
        raise UsageError(f"{padded[0]} is padded for several devices. Load with tensor_parallel_size 1 to save.")
    make_folder(out_folder)
    dtype = jax.tree.leaves(params)[0].dtype.name
    copy_side_files(model_folder, out_folder, lambda described: plain_description(described, dtype))
    # Last, and atomic: a folder with arrays is complete.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((out_folder / ARRAYS).absolute(), args=ocp.args.PyTreeSave(arrays))


def make_folder(folder: Path) -> None:
    """A new or empty folder. Raises UsageError when it holds something already or cannot be made."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not empty. Choose a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Choose another folder.") from None


def copy_side_files(
    model_folder: Path, out_folder: Path, described: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> None:
    """Whatever the tokenizer needs, and configuration: what `described` makes of the model's config.json."""
    for path in (path for pattern in SIDE_FILES for path in model_folder.glob(pattern)):
        if path.name not in {"model.safetensors.index.json", MISTRAL_INDEX, PARAMS, PLACES, *BESIDE}:
            shutil.copyfile(path, out_folder / path.name)
    own = model_folder / "config.json"
    config = json.loads(own.read_text(encoding="utf-8")) if own.exists() else description_of(model_folder)
    changed = described(config)
    if changed != config or not own.exists():
        (out_folder / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def plain_description(config: Mapping[str, Any], dtype: str) -> Mapping[str, Any]:
    """config.json with the type that the arrays have now, and without a word of quantisation."""
    plain = without_description(config)
    is_same = plain == config and config.get("dtype", config.get("torch_dtype")) == dtype
    return config if is_same else {**plain, "dtype": dtype}


def load_orbax(
    specs: Any, config: Any, folder: Path, mesh: Mesh, dtype: Any, progress: Callable[[int, int], None]
) -> Any:
    """Parameters in the shape of `specs`, cast to `dtype`, read by every device in its own part.

    Arrays that this mesh pads or repeats, or that are to be quantized, go through the host. Raises CheckpointError
    when arrays are missing, too many, of another shape, or unreadable.
    """
    import orbax.checkpoint as ocp

    names, sizes = names_of(specs), config.dim_sizes()
    shapes = jax.tree.leaves(param_shapes(specs, config, mesh, dtype), is_leaf=is_quantized)
    stored = stored_shapes(specs, sizes)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            path = (folder / ARRAYS).absolute()
            found_there = checkpointer.metadata(path).item_metadata
            if found_there is not None and has_tower(found_there.tree) and not has_tower(stored):
                names = [BESIDE_TOWER + name for name in names]
                stored = {BESIDE_TOWER + name: shape for name, shape in stored.items()}
            check_arrays(found_there, stored, path)
            wanted = {
                name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=dtype)
                if is_quantized(shape) or shape.shape != stored[name]
                else ocp.ArrayRestoreArgs(dtype=shape.dtype, sharding=shape.sharding)
                for name, shape in zip(names, shapes, strict=True)
            }
            found: dict[str, Any] = {}
            sizes_in_bytes = {name: math.prod(stored[name]) * jnp.dtype(dtype).itemsize for name in names}
            for few in read_at_once(sizes_in_bytes):
                some = {name: wanted[name] for name in few}
                found |= checkpointer.restore(path, args=ocp.args.PyTreeRestore(some, some, partial_restore=True))
                progress(sum(sizes_in_bytes[name] for name in found), sum(sizes_in_bytes.values()))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / ARRAYS} cannot be read: {error}. Run `jaxpaged convert` again.") from error
    rooms = Rooms()
    arrays = [
        found[name] if isinstance(found[name], jax.Array) else place_part(spec, found[name], sizes, mesh, dtype, rooms)
        for name, spec in zip(names, jax.tree.leaves(specs), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(specs), arrays)


def read_array(folder: Path, name: str) -> np.ndarray:
    """One array on the host, in float32. Raises CheckpointError."""
    import orbax.checkpoint as ocp

    path = (folder / ARRAYS).absolute()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            there = checkpointer.metadata(path).item_metadata.tree
            name = name if name in there else BESIDE_TOWER + name
            wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32)}
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(wanted, wanted, partial_restore=True))[name]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / ARRAYS} cannot be read: {error}. Run `jaxpaged convert` again.") from error


def read_at_once(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The names of arrays in their order, as many at a time as have `BYTES_AT_ONCE`, or one that has more."""
    few, num_bytes = list[str](), 0
    for name, size in sizes.items():
        if few and num_bytes + size > BYTES_AT_ONCE:
            yield few
            few, num_bytes = [], 0
        few.append(name)
        num_bytes += size
    yield few


def has_tower(names: Iterable[str]) -> bool:
    """Whether arrays of these names are those of a model that sees."""
    return any(name.startswith(TOWER) for name in names)


def names_of(specs: Any) -> list[str]:
    """`layers.0.self_attn.q_proj.weight`: the path of every parameter."""
    paths, _ = jax.tree_util.tree_flatten_with_path(specs)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def stored_shapes(specs: Any, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Parameter path -> its shape in this format: one axis per letter, in the checkpoint's sizes."""
    leaves: list[Spec] = jax.tree.leaves(specs)
    return {
        name: tuple(sizes[letter] for letter in spec.stored_dims)
        for name, spec in zip(names_of(specs), leaves, strict=True)
    }


def check_arrays(metadata: Any, stored: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """CheckpointError unless the arrays are those that config.json describes. `metadata` is orbax's, or None."""
    if metadata is None:
        raise CheckpointError(
            f"{path} has no readable list of its arrays: it is damaged. Run `jaxpaged convert` again."
        )
    found = metadata.tree
    if not has_tower(stored):  # it may stay on disk
        found = {name: array for name, array in found.items() if not name.startswith(TOWER)}
    for name in sorted(found.keys() ^ stored.keys()):
        state = "is missing" if name in stored else "is not part of the model that config.json describes"
        raise CheckpointError(f"{path}: array {name} {state}. Run `jaxpaged convert` again.")
    for name, shape in stored.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(
                f"{path}: array {name} has shape {tuple(found[name].shape)}, but config.json makes it {shape}. "
                "Run `jaxpaged convert` again."
            )
