"""Weights from files, straight to the devices that hold them, one tensor at a time.

`load_params` reads a folder of safetensors files (or one that `jaxpaged convert` wrote, see `orbax_format.py`)
against a pytree of `Spec`: every tensor that a spec names must be there in its shape, and no other. Peak memory
is the parameters plus one of them. Knows letters and files; what a model is comes in as specs.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.config import EMBEDDED_MODEL
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params import orbax_format
from jaxpaged.params.encoded import settled
from jaxpaged.params.expected import check_entries, stored_tensors, tensors_of
from jaxpaged.params.gguf_folder.places_file import gguf_entries, is_gguf_folder
from jaxpaged.params.hub import ASSETS
from jaxpaged.params.kv_scales import LayerScales, stored_scales, without_kv_scales
from jaxpaged.params.mistral_folder import MISTRAL_INDEX, MISTRAL_WEIGHTS, description_of, in_checkpoint
from jaxpaged.params.other_formats import is_mistral_folder, refuse_other_folder, refuse_pointers
from jaxpaged.params.placing import own_matrices, place, place_encoded
from jaxpaged.params.quantized import (
    ZERO,
    PackedArray,
    QuantizedArray,
    StoredArray,
    array_bytes,
    in_bytes,
    is_quantized,
    packed_rows,
    rounded_rows,
)
from jaxpaged.params.recoding import Losses
from jaxpaged.params.rooms import Rooms
from jaxpaged.params.safetensors_reader import (
    TensorEntry,
    once_each,
    read_header,
)
from jaxpaged.params.schemes.scheme import Quantization
from jaxpaged.params.sharding import param_shapes
from jaxpaged.params.spec import Spec
from jaxpaged.params.unused import check_copies

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

OTHER_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.visual.", "visual."),
    ("midlayer.", "model.layers.0."),
    ("bert.", "model."),
    ("roberta.", "model."),
)
"""Where models that also see images keep their language model and their tower, heads that draft their only layer, and
encoders with a head their layers -> the names of a text model, and of a tower."""

INDEX = "model.safetensors.index.json"
BARE = re.compile(r"(embed_tokens|layers|norm|embeddings|encoder|pooler|final_norm)\.")
"""Beginnings of names in checkpoints of a model without a head, as embedding models are stored."""


SHA256 = re.compile(r"[0-9a-f]{64}")

OLD_NORMS, NORM_NAMES = re.compile(r"(LayerNorm\.)(gamma|beta)$"), {"gamma": "weight", "beta": "bias"}
"""Names of BERT's norms in files of its first years."""


def checkpoint_version(folder: Path) -> str:
    """A name of the weights in a folder: files that were written anew, here or elsewhere, have another one. It is taken
    from what the system says of the files, not from their content, which would take as long to read as to load."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    lines = [f"{name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}" for name, stat in facts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def content_version(folder: Path) -> str:
    """A name of the weights in a folder that equal ones have on every machine: of the files that hold tensors, and of
    those that describe them. They are read, all at a time. Raises what `every_entry` does."""
    if orbax_format.is_orbax(folder):
        weights = {path for path in folder.rglob("*") if path.is_file()}
    else:
        weights = {entry.path for entry in every_entry(folder).values()}
    files = sorted(weights | {*folder.glob("*.json")})
    with ThreadPoolExecutor() as threads:
        lines = [f"{path.relative_to(folder)} {digest}" for path, digest in zip(files, threads.map(digest_of, files))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def digest_of(path: Path) -> str:
    """A file's SHA-256. The hub's cache calls large files so, which are not read then."""
    stored = path.resolve()
    if stored.parent.parent.name.startswith("models--") and SHA256.fullmatch(stored.name):
        return stored.name
    with open(stored, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_params(
    specs: Any,
    config: Any,
    folder: str | Path,
    mesh: Mesh,
    dtype: Any,
    progress: Progress | None = None,
    load_format: str = "auto",
    is_whole: bool = True,
) -> Any:
    """Parameters in the shape of `specs`, cast to `dtype` or quantized, sharded over `mesh`.

    `load_format` is "safetensors", "orbax", or "auto": whichever the folder holds. `is_whole`: the files hold nothing
    else. Raises CheckpointError for files or tensors that are missing, damaged, misnamed, of another shape, or extra.
    """
    folder, progress = Path(folder), progress or (lambda done, total: None)
    if load_format == "orbax" or (load_format == "auto" and orbax_format.is_orbax(folder)):
        return orbax_format.load_orbax(specs, config, folder, mesh, dtype, progress)
    entries = checked_entries(specs, config, folder, is_whole)
    total, done, sizes = num_bytes(param_shapes(specs, config, mesh, dtype)), 0, config.dim_sizes()
    rooms, losses = Rooms(), Losses()

    def load(spec: Spec) -> Any:
        nonlocal done
        array = load_param(spec, entries, sizes, mesh, dtype, rooms, losses)
        done += array.nbytes
        progress(done, total)
        return array

    params = jax.tree.map(load, specs)
    if said := losses.in_words():
        logger.info("%s: %s", folder, said)
    return params


def load_param(
    spec: Spec,
    entries: Mapping[str, TensorEntry],
    sizes: Mapping[str, int],
    mesh: Mesh,
    dtype: Any,
    rooms: Rooms,
    losses: Losses,
) -> Any:
    """A parameter on its devices, of the tensors that it has in a checkpoint."""
    if spec.scheme is not None:
        return place_encoded(spec, own_matrices(spec, entries, sizes), sizes, mesh, dtype, rooms, losses)
    with stored_tensors(spec, entries, sizes) as stored:
        return place(spec, stored, sizes, mesh, dtype, rooms)


def checked_entries(specs: Any, config: Any, folder: Path, is_whole: bool) -> dict[str, TensorEntry]:
    """Tensor name -> where it lies, of what `specs` name. Raises what `load_params` does."""
    entries = entries_of_folder(folder)
    if not is_whole:
        wanted = tensors_of(jax.tree.leaves(specs), config.dim_sizes())
        entries = {name: entry for name, entry in entries.items() if name in wanted}
    entries = without_further_layers(entries, config)
    check_entries(jax.tree.leaves(specs), entries, config, folder)
    return entries


def settled_quantization(quantization: Quantization, specs: Any, folder: Path) -> Quantization:
    """What is known once the files have been asked of modules of which config.json says nothing. Without files it is
    as it was."""
    if not has_safetensors(folder):
        return quantization
    return settled(quantization, specs, entries_of_folder(folder))


def check_folder(specs: Any, config: Any, folder: Path) -> None:
    """Raise what loading the whole of `specs` would, so that parts of it can be loaded. ConfigError for a folder of the
    format that is only read as a whole."""
    if orbax_format.is_orbax(folder):
        raise ConfigError(
            f"{folder} was written by `jaxpaged convert`, which is read as a whole, but pipeline_parallel_size asks "
            "for stages. Use the folder that it was made of, or leave the option out."
        )
    checked_entries(specs, config, folder, is_whole=True)


def without_further_layers(entries: Mapping[str, TensorEntry], config: Any) -> dict[str, TensorEntry]:
    """The tensors of the decoder, without those of layers behind it that predict further tokens."""
    unused = further_layers(config)
    kept = {name: entry for name, entry in entries.items() if not name.startswith(unused)}
    if len(kept) < len(entries):
        skipped, names = len(entries) - len(kept), ", ".join(unused)
        logger.info("%d tensors are not loaded: layers that predict further tokens (%s)", skipped, names)
    return kept


def further_layers(config: Any) -> tuple[str, ...]:
    """How names of tensors begin that belong to layers behind the decoder."""
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(config.num_mtp_layers))


def num_bytes(shapes: Any) -> int:
    """Bytes of all arrays of a pytree, every value counted once."""
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))


def entries_of_folder(folder: Path) -> dict[str, TensorEntry]:
    """Tensor name, as a text model has it -> where it lies, of weights: without scales of what attention caches. Raises
    what `every_entry` does."""
    return without_kv_scales(every_entry(folder))


def kv_scales_of(folder: Path, heads: Mapping[int, int]) -> LayerScales:
    """The scales of cached keys and values that a checkpoint has, of the layers among `heads`, which have as many kv
    heads. Raises CheckpointError."""
    return stored_scales(every_entry(folder), heads) if has_safetensors(folder) else {}


def has_safetensors(folder: Path) -> bool:
    """Whether the weights of a folder are in such files."""
    return not orbax_format.is_orbax(folder) and any(folder.glob("*.safetensors"))


def every_entry(folder: Path) -> dict[str, TensorEntry]:
    """Tensor name, as a text model has it -> where it lies. The index says in which file.

    Raises CheckpointError for a tensor that the index does not name there, and for two of one meaning, unless they are
    equal.
    """
    if is_gguf_folder(folder):
        return gguf_entries(folder)
    refuse_pointers(folder)
    if is_mistral_folder(folder):
        return mistral_entries(folder)
    found: dict[str, TensorEntry] = {}
    copies: dict[str, list[TensorEntry]] = {}
    index = read_index(folder / INDEX) if (folder / INDEX).exists() else None
    files = {str(path.relative_to(folder)): read_header(path) for path in weight_files(folder)}
    if index is not None:
        check_index(folder, index, {file: {entry.name for entry in entries} for file, entries in files.items()})
    for file, entries in files.items():
        for entry in entries:
            name = canonical_name(entry.name)
            if name in found or (index is not None and index[entry.name] != file):
                copies.setdefault(name, []).append(entry)
            else:
                found[name] = entry
    for name, others in copies.items():
        check_copies(found[name], others)
    return found


def mistral_entries(folder: Path) -> dict[str, TensorEntry]:
    """The same of a folder in Mistral's own format."""
    hf, found = description_of(folder), dict[str, TensorEntry]()
    for path in mistral_files(folder):
        for stored in read_header(path):
            entry = in_checkpoint(stored, hf)
            if entry.name in found:
                check_copies(found[entry.name], [entry])
            found[entry.name] = entry
    return found


def mistral_files(folder: Path) -> list[Path]:
    """Those of the index, or all that are called so. CheckpointError where there is none."""
    index = folder / MISTRAL_INDEX
    names = read_index(index).values() if index.exists() else [path.name for path in folder.glob(MISTRAL_WEIGHTS)]
    if not names:
        raise CheckpointError(f"{folder} holds params.json, but no {MISTRAL_WEIGHTS}. Download the model again.")
    return [folder / name for name in sorted({*names})]


def check_index(folder: Path, index: Mapping[str, str], names: Mapping[str, Collection[str]]) -> None:
    """CheckpointError unless every tensor lies where the index says, and none besides in the files that it names."""
    for name, file in index.items():
        if name not in names[file]:
            raise CheckpointError(
                f"{folder / INDEX} says that {name} is in {file}, but it is not there. Download the model again."
            )
    for file, own in names.items():
        for name in own:
            if name not in index:
                raise CheckpointError(
                    f"{folder / file} holds {name}, which {INDEX} does not name, so it is no part of the model. "
                    "Download the model again, with its index, or take the tensor out."
                )


def canonical_name(name: str) -> str:
    name = OLD_NORMS.sub(lambda found: found[1] + NORM_NAMES[found[2]], name)
    for prefix, replacement in OTHER_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return f"model.{name}" if BARE.match(name) else name


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, or the only one."""
    index, single = folder / INDEX, folder / "model.safetensors"
    if index.exists():
        return [folder / name for name in sorted(set(read_index(index).values()))]
    if single.exists():
        return [single]
    found = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    if len(found) == 1:
        return [folder / found[0]]
    if found:
        raise CheckpointError(
            f"{folder} has {len(found)} safetensors files ({', '.join(found[:3])}, ...) but no {index.name} to say "
            "which belong together. Download the model again, with its index."
        )
    refuse_other_folder(folder)
    others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)]
    hint = "Is it the folder of a model?"
    if others:
        hint = f"{others[0]} is there, but only safetensors files are read: use the model's safetensors version."
    raise CheckpointError(f"{folder} holds no *.safetensors file. {hint}")


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> the name of its file. CheckpointError when the index is unreadable, names a missing file, or is
    wrong."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=once_each)["weight_map"]
        names = sorted(set(weight_map.values()))
        well_formed = names and all(Path(name).name == name or is_embedded(index.parent, name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(f"{index} has no readable map of tensors to files. Download it again.")
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} files that {index} names are missing: {', '.join(missing[:5])}. "
            "Download them."
        )
    return weight_map


def is_embedded(folder: Path, name: str) -> bool:
    """Whether an embedded model takes this file from the folder of another one: the same weights are there once."""
    return folder.parent == ASSETS and name == f"../{EMBEDDED_MODEL}/model.safetensors"


class DummyParams:
    """Random parameters, made on their devices from the seed; the same on any mesh unless axes are padded. An expert is
    the same in all of its places.

    Vectors are ones, matrices uniform in [-0.035, 0.035], a deviation of about 0.02. `whole`: specs of a model of which
    these are a part; each parameter is as it is in all of it.
    """

    def __init__(self, specs: Any, config: Any, mesh: Mesh, dtype: Any, seed: int = 0, whole: Any = None):
        shapes = param_shapes(specs, config, mesh, dtype)
        self._leaves, self._tree = jax.tree.flatten(shapes, is_leaf=is_quantized)
        self._programs: dict[Any, Callable[[jax.Array], Any]] = {}
        sizes = config.dim_sizes()
        for leaf, spec in zip(self._leaves, jax.tree.leaves(specs), strict=True):
            shardings = jax.tree.map(lambda array: array.sharding, leaf)
            num_first = sizes["E"] if spec.dims.startswith("e") else (*leaf.shape, 1)[0]
            make = partial(random_param, like=leaf, num_first=num_first)
            self._programs.setdefault(leaf, jax.jit(make, out_shardings=shardings))
        all_specs, own = jax.tree.leaves(specs if whole is None else whole), jax.tree.leaves(specs)
        keys = dict(zip(all_specs, jax.random.split(jax.random.key(seed), len(all_specs)), strict=True))
        self._keys = [keys[spec] for spec in own]

    def make(self) -> Any:
        """The parameters; only the first time compiles what makes them."""
        keys = zip(self._keys, self._leaves, strict=True)
        return self._tree.unflatten(self._programs[leaf](key) for key, leaf in keys)


def random_param(key: jax.Array, like: Any, num_first: int) -> Any:
    """A random parameter, quantized where `like` is. After the first `num_first` of its first axis they come again."""
    if jnp.issubdtype(like.dtype, jnp.integer):
        return jnp.zeros(like.shape, like.dtype)
    if len(like.shape) <= 1:
        return jnp.ones(like.shape, like.dtype)
    weight = jax.random.uniform(key, (num_first, *like.shape[1:]), like.dtype, minval=-0.035, maxval=0.035)
    if num_first < like.shape[0]:
        weight = weight[jnp.arange(like.shape[0]) % num_first]
    if not is_quantized(like):
        return weight
    if isinstance(like, PackedArray):
        packed, scales = packed_rows(weight.reshape(-1, weight.shape[-1]).astype(jnp.float32), jnp)
        scales = scales.astype(jnp.bfloat16).reshape(like.scales.shape)
        return PackedArray(packed.reshape(like.packed.shape), scales, like.dtype)
    if isinstance(like, StoredArray):
        return random_stored(key, like)
    out_shape = like.scales.shape
    values, scales = rounded_rows(weight.reshape(math.prod(out_shape), -1).astype(jnp.float32), jnp)
    values = values.astype(jnp.int8).astype(like.values.dtype)
    return QuantizedArray(values.reshape(like.shape), scales.reshape(out_shape), like.dtype)


def random_stored(key: jax.Array, like: StoredArray) -> StoredArray:
    """A random parameter in groups: whole numbers from -7 to 7, all types of which have these."""
    values = jax.random.randint(key, like.shape, -7, 8, jnp.int8)
    if like.is_packed:
        values = in_bytes((values + ZERO).astype(jnp.uint8).reshape(-1)).reshape(like.values.shape)
    values = values.astype(like.values.dtype)
    scales = jnp.full(like.scales.shape, 0.005, like.scales.dtype)
    none = ZERO if like.is_packed else 0
    zeros = None if like.zeros is None else jnp.full(like.zeros.shape, none, jnp.float32)
    order = None if like.order is None else jnp.arange(like.order.shape[0], dtype=jnp.int32)
    return like.replace(values=values, scales=scales, zeros=zeros, order=order)
