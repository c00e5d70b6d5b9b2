"""Folders and files that people have instead of a checkpoint, recognised by what lies there, and what to do.

Each function raises CheckpointError for what it recognises and is silent otherwise: the caller has the general words.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError

LFS_FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
LARGEST_POINTER = 1024
"""Bytes; the format allows no more."""
NEEDED_SUFFIXES = {".safetensors", ".json", ".model", ".tiktoken", ".jinja", ".txt"}
"""Of files that an engine reads. A picture or a PyTorch file may stay a pointer."""

USE_SAFETENSORS = (
    "Name the folder or hub id of the model's safetensors version, usually the repository that it was made from."
)


def refuse_pointers(folder: Path) -> None:
    """For files that git left as Git-LFS pointers: their content was never downloaded."""
    pointers = sorted(path.name for path in folder.iterdir() if path.suffix in NEEDED_SUFFIXES and is_pointer(path))
    if pointers:
        more = f" and {len(pointers) - 1} more" if len(pointers) > 1 else ""
        raise CheckpointError(
            f"{folder / pointers[0]}{more}: this is a Git-LFS pointer and not the file itself. Run "
            f"'git lfs install && git lfs pull' in {folder}, or download the model with 'hf download'."
        )


def is_pointer(path: Path) -> bool:
    try:
        if path.stat().st_size > LARGEST_POINTER:
            return False
        with path.open("rb") as file:
            return file.read(len(LFS_FIRST_BYTES)) == LFS_FIRST_BYTES
    except OSError:
        return False


def refuse_gguf_name(name: str) -> None:
    """For the name of a GGUF file or repository, with or without a quantisation behind a colon."""
    last = name.rstrip("/").rsplit("/", 1)[-1].partition(":")[0].lower()
    if last.endswith("gguf"):
        raise CheckpointError(f"{name} holds a model in GGUF format, which is not read. {USE_SAFETENSORS}")


def refuse_other_folder(folder: Path) -> None:
    """For a folder without a model's description, or without weights, that holds something else."""
    if (folder / "model_index.json").exists():
        raise CheckpointError(
            f"{folder} holds a diffusers pipeline (model_index.json), which makes images or the like and not text. "
            "Name a language model."
        )
    if gguf := sorted(path.name for path in folder.glob("*.gguf")):
        raise CheckpointError(f"{folder / gguf[0]} is a model in GGUF format, which is not read. {USE_SAFETENSORS}")


def refuse_part_of_pipeline(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """For a part of a diffusers pipeline, whose config.json says so."""
    if "_diffusers_version" in hf_config:
        raise CheckpointError(
            f"{folder / 'config.json'} describes {hf_config.get('_class_name', 'a part')} of a diffusers pipeline, not "
            "a language model. Name a language model."
        )
