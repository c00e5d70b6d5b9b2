"""The two files of an adapter's folder, each read once: what is hashed is what is used, whatever happens to the files.

Knows safetensors and no names of tensors.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from jaxpaged.config.lora import ADAPTER_CONFIG
from jaxpaged.errors import CheckpointError
from jaxpaged.params.adapters.description import Description, read_description
from jaxpaged.params.other_formats import refuse_pointers
from jaxpaged.params.safetensors_reader import DTYPES, TensorEntry, header_of

WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
TO_SAFETENSORS = (
    "python -c \"import torch; from safetensors.torch import save_file; save_file(torch.load('adapter_model.bin', "
    "weights_only=True), 'adapter_model.safetensors')\""
)


@dataclass(frozen=True)
class AdapterFiles:
    """`tensors`: name in the file -> a view of what was read. `digest`: sha256, in hex, of both files' bytes, the
    configuration's first."""

    folder: Path
    description: Description
    digest: str
    tensors: Mapping[str, np.ndarray]


def read_files(folder: Path) -> AdapterFiles:
    """Read an adapter's files. Raises CheckpointError for files that are missing, damaged, or of another kind."""
    check_folder(folder)
    config, weights = (bytes_of(folder / name) for name in (ADAPTER_CONFIG, WEIGHTS))
    description = read_description(config, str(folder / ADAPTER_CONFIG))
    entries = header_of(BytesIO(weights), folder / WEIGHTS, len(weights))
    if not entries:
        raise CheckpointError(f"{folder / WEIGHTS} holds no tensors. Save the adapter again, or download it again.")
    digest = hashlib.sha256(config)
    digest.update(weights)
    return AdapterFiles(folder, description, digest.hexdigest(), {each.name: tensor(weights, each) for each in entries})


def check_folder(folder: Path) -> None:
    """CheckpointError where the files are not there, saying what is."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}. Name the folder of an adapter, with its {ADAPTER_CONFIG}.")
    refuse_pointers(folder)
    if not (folder / ADAPTER_CONFIG).exists():
        what = " It holds a whole model: name it as the model." if (folder / "config.json").exists() else ""
        raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG}, so it is not the folder of an adapter.{what}")
    if (folder / WEIGHTS).exists():
        return
    if (folder / OLD_WEIGHTS).exists():
        raise CheckpointError(
            f"{folder} has {OLD_WEIGHTS} and no {WEIGHTS}. Loading the former can run code, so it is not read. Where "
            f"you trust it, convert it in that folder: {TO_SAFETENSORS}"
        )
    raise CheckpointError(f"{folder} has {ADAPTER_CONFIG} but no {WEIGHTS}. Download it, or save the adapter again.")


def bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. Check its permissions.") from None


def tensor(data: bytes, entry: TensorEntry) -> np.ndarray:
    """A view of a tensor. CheckpointError for a type that adapters do not have, and for numbers that are none."""
    if entry.dtype not in DTYPES:
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} has type {entry.dtype}; supported: {', '.join(DTYPES)}. Save the "
            "adapter in one of these."
        )
    found = np.frombuffer(data, np.uint8, entry.num_bytes, entry.begin).view(DTYPES[entry.dtype]).reshape(entry.shape)
    if not np.isfinite(found).all():
        raise CheckpointError(
            f"{entry.path}: tensor {entry.name} holds numbers that are infinite or none. The training failed, or the "
            "file is damaged: use an earlier checkpoint, or download it again."
        )
    return found
