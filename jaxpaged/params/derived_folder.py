"""A checkpoint made of another one, file by file and with its files' names: what conversions have in common.

Knows files and the index of tensors, and not what becomes of a tensor.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.params.checkpoint import INDEX, every_entry
from jaxpaged.params.orbax_format import copy_side_files, make_folder
from jaxpaged.params.safetensors_reader import TensorEntry

WriteFile = Callable[[Path, Mapping[str, TensorEntry]], Iterable[str]]
"""Writes what becomes of a file's tensors, which have the names of a text model, and returns their names in the new
one."""


def write_derived(
    folder: Path,
    out_folder: Path,
    write_file: WriteFile,
    described: Callable[[dict[str, Any]], Mapping[str, Any]],
    progress: Callable[[int, int], None],
) -> None:
    """Write each file of `folder` anew to a new folder, and what lies beside the weights. `described` is asked last
    what becomes of config.json; `progress` gets bytes that were read, and those of all files.

    Raises UsageError when `out_folder` holds something or cannot be made; CheckpointError for files that are damaged.
    """
    files: dict[Path, dict[str, TensorEntry]] = {}
    for name, entry in every_entry(folder).items():
        files.setdefault(entry.path, {})[name] = entry
    make_folder(out_folder)
    index: dict[str, str] = {}
    done, total = 0, sum(path.stat().st_size for path in files)
    for path, entries in files.items():
        file_name = path.name if path.parent == folder else f"{path.parent.name}-{path.name}"  # of a model beside it
        index |= dict.fromkeys(write_file(out_folder / file_name, entries), file_name)
        progress(done := done + path.stat().st_size, total)
    if len(files) > 1:
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2) + "\n"
        (out_folder / INDEX).write_text(text, encoding="utf-8")
    copy_side_files(folder, out_folder, described)
