"""Reads where the tensors of a GGUF file lie from the folder that was made for it (`folder.py`)."""

import json
from pathlib import Path

from jaxpaged.errors import CheckpointError
from jaxpaged.params.safetensors_reader import TensorEntry, read_header

PLACES, VECTORS = "places.json", "vectors.safetensors"


def is_gguf_folder(folder: Path) -> bool:
    return (folder / PLACES).exists()


def gguf_entries(folder: Path) -> dict[str, TensorEntry]:
    """Tensor name -> where it lies. CheckpointError where the file is gone, or was replaced by a shorter one."""
    places = json.loads((folder / PLACES).read_text(encoding="utf-8"))
    files = {folder / facts[0] for facts in places.values()}
    sizes = {file.name: file.stat().st_size for file in files if file.exists()}
    entries = {entry.name: entry for entry in read_header(folder / VECTORS)}
    for name, (file, kind, shape, begin, num_bytes) in places.items():
        if begin + num_bytes > sizes.get(file, 0):
            found = (folder / file).resolve()
            raise CheckpointError(f"{found} is gone, or was replaced while it was in use. Start again.")
        entries[name] = TensorEntry(folder / file, name, kind, tuple(shape), begin, num_bytes)
    return entries
