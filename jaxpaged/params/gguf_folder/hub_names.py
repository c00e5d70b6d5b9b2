"""GGUF files of a hub by the names that vLLM and llama.cpp have for them. Knows nothing of how they are downloaded.

OWNER/NAME:Q4_K_M      the model of this kind in a repository
OWNER/NAME/FILE.gguf   a file of it, also in a folder; of a split model the first one
OWNER/NAME             the only model of a repository, or its Q4_K_M
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpaged.errors import CheckpointError

DEFAULT = "Q4_K_M"
"""llama.cpp's, where there are several and none is named."""
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
"""What the name of a file of a split model has besides the model's."""
SPELLED = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+)|/(.+\.gguf))?", re.IGNORECASE)
NO_MODELS = re.compile(r"(^|[-._/])(mmproj|imatrix)", re.IGNORECASE)
"""Towers of models that see, and what rounding was made with."""


@dataclass(frozen=True)
class HubName:
    """`kind` or `file` is empty where it is not named."""

    repository: str
    kind: str = ""
    file: str = ""


def hub_name(name: str) -> HubName | None:
    """What a name says; None for one that cannot be of a hub."""
    found = SPELLED.fullmatch(name)
    if found is None or name.startswith((".", "-")) or ".." in name:
        return None
    return HubName(found[1], found[2] or "", found[3] or "")


def models_in(files: Iterable[str]) -> dict[str, list[str]]:
    """The models among the files of a repository: name without part -> its files in order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not NO_MODELS.search(file):
            models.setdefault(PART.sub("", file), []).append(file)
    return models


def chosen(name: HubName, files: Iterable[str]) -> list[str]:
    """The files of the model that is named. CheckpointError where there is none, or are several."""
    models = models_in(files)
    if name.file:
        found = [model for model, parts in models.items() if name.file == model or name.file in parts]
    elif name.kind or len(models) > 1:
        found = [model for model in models if is_kind(model, name.kind or DEFAULT)]
    else:
        found = [*models]
    if len(found) == 1:
        return models[found[0]]
    said = name.file or name.kind or DEFAULT
    if not models:
        raise CheckpointError(f"{name.repository} has no models in GGUF format. Check the name.")
    several = f"{len(found)} models that are {said}: {shown(found)}" if found else f"no {said}, but {shown(models)}"
    raise CheckpointError(f"{name.repository} has {several}. Name one: {name.repository}/FILE.gguf.")


def is_kind(model: str, kind: str) -> bool:
    """Whether its name, or that of its folder, says that a model is of this kind. Unsloth's own kinds begin with UD."""
    piece = rf"(?:^|(?<!-UD)[-._/]){re.escape(kind)}(?=[-./])"
    return re.search(piece, model, re.IGNORECASE) is not None


def shown(models: Iterable[str]) -> str:
    names = [*models]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
