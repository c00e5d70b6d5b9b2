"""A model's name -> a folder with its files: the embedded model, a folder, a GGUF file, or a download from the Hugging
Face hub.

Only weights in safetensors format, configuration and tokenizer are downloaded, or the files of one GGUF model. Knows
nothing of their content.
"""

import contextlib
import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxpaged.config import EMBEDDED_MODEL
from jaxpaged.config.lora import ADAPTER_CONFIG
from jaxpaged.config.speculation import OWN_DRAFT_MODELS
from jaxpaged.errors import CheckpointError, without_secrets
from jaxpaged.params.gguf_folder.hub_names import PART, HubName, chosen, hub_name, models_in
from jaxpaged.params.other_formats import is_mistral_folder, refuse_pointers

ASSETS = Path(__file__).parent.parent / "assets"
EMBEDDED_FOLDER = ASSETS / EMBEDDED_MODEL
EMBEDDED_SEEING = "demo-vision"
"""The embedded model with a tower, through which it sees. Its index takes the text weights from the other's folder."""
EMBEDDED_ADAPTER = "demo-pirate"
"""A LoRA adapter for the embedded model, with which it answers as a pirate would."""
EMBEDDED_FOLDERS = {name: ASSETS / name for name in (EMBEDDED_MODEL, EMBEDDED_SEEING, *OWN_DRAFT_MODELS.values())}

WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt"]
DESCRIPTION_FILES = [
    "config.json",
    "params.json",
    "model_index.json",
    ADAPTER_CONFIG,
    "*quant*_config.json",
    "*processor_config.json",
]
TOKENIZER_FILES = [name for name in WANTED_FILES if not name.endswith(".safetensors")]
ADAPTER_FILES = [ADAPTER_CONFIG, "adapter_model.safetensors"]
OF_MISTRAL = "consolidated*"
"""Weights in Mistral's own format, mostly a second copy of what is there in Hugging Face's."""
UNWANTED_FILES = [OF_MISTRAL, "original/*", "onnx/*", "*/*"]
"""Second copies of the weights in other layouts, and whatever lies in sub-folders."""


def resolve_model_folder(
    name: str, revision: str | None = None, download_dir: str | None = None, *, wanted: Sequence[str] = WANTED_FILES
) -> Path:
    """The folder of model `name`: an embedded one, an existing folder or GGUF file, a hub id such as "Qwen/Qwen3-0.6B",
    or a GGUF model of a hub (`gguf_folder/hub_names.py`).

    `revision` is a branch, tag or commit and `download_dir` the cache, both for the hub only, as are the files that are
    `wanted` from it. Raises CheckpointError when there is no such folder and the hub cannot give it, and for what is
    recognised as no checkpoint.
    """
    if name in EMBEDDED_FOLDERS:
        return EMBEDDED_FOLDERS[name]
    folder = Path(name).expanduser()
    if file := gguf_file(folder):
        return folder_of(file)
    if folder.is_dir():
        refuse_pointers(folder)
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file. Name the folder that holds config.json and *.safetensors, or a file *.gguf."
        )
    of_hub = hub_name(name)
    if name.lower().endswith(".gguf") and not (of_hub and of_hub.file):
        raise CheckpointError(f"there is no file {name}. Check the path.")
    if of_hub and (of_hub.kind or of_hub.file or name.lower().endswith("gguf")):
        return folder_of(download_gguf(of_hub, revision, download_dir))
    if not looks_like_hub_id(name):
        raise CheckpointError(
            f"there is no folder {without_secrets('model', name)}, and it cannot be a hub id (owner/name). "
            f"Name a folder, a hub id, or {EMBEDDED_MODEL!r} for the embedded model."
        )
    folder = download(name, revision, download_dir, wanted)
    if of_hub and not (folder / "config.json").exists() and models_in(files_of(name, revision, download_dir)):
        return folder_of(download_gguf(of_hub, revision, download_dir))
    if is_mistral_folder(folder):
        return download(name, revision, download_dir, wanted, [each for each in UNWANTED_FILES if each != OF_MISTRAL])
    return folder


def folder_of(file: Path) -> Path:
    """That of the model in a GGUF file."""
    from jaxpaged.params.gguf_folder.folder import make_folder  # with numpy

    return make_folder(file)


def adapter_folder(name: str) -> Path:
    """Of an embedded adapter's name, or of a path."""
    return ASSETS / name if name == EMBEDDED_ADAPTER else Path(name).expanduser()


def resolve_adapter_folder(name: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The folder of an adapter: the embedded one, an existing folder, or a hub id. What is in it is not looked at.
    Raises CheckpointError when there is no such folder and the hub cannot give it."""
    folder = adapter_folder(name)
    if folder.is_dir():
        return folder
    if not looks_like_hub_id(name):
        raise CheckpointError(
            f"there is no folder {without_secrets('adapter', name)}, and it cannot be a hub id (owner/name). Name the "
            "folder of an adapter."
        )
    return download(name, revision, download_dir, ADAPTER_FILES)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or that is all there is in a folder; None where it is something else.

    CheckpointError for a folder with several models.
    """
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    models = {PART.sub("", file.name): file for file in reversed(found)}
    if len(models) > 1:
        names = ", ".join(file.name for file in found[:6])
        raise CheckpointError(f"{path} holds {len(models)} models in GGUF format ({names}). Name one of the files.")
    return found[0] if found else None


def looks_like_hub_id(name: str) -> bool:
    """Whether `name` is spelled like `owner/model` or `model`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None


def download_gguf(name: HubName, revision: str | None, download_dir: str | None) -> Path:
    """The first file of a GGUF model in the local cache."""
    parts = chosen(name, files_of(name.repository, revision, download_dir))
    wanted = [glob.escape(part) for part in parts]
    return download(name.repository, revision, download_dir, wanted, unwanted=()) / parts[0]


def files_of(name: str, revision: str | None, download_dir: str | None) -> list[str]:
    """The names of all files of a repository; where the hub does not answer, of those in the local cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    with described_errors(name, revision):
        try:
            return HfApi().list_repo_files(name, revision=revision)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except (OSError, HTTPError):
            folder = Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
            return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def download(
    name: str,
    revision: str | None,
    download_dir: str | None,
    wanted: Sequence[str],
    unwanted: Sequence[str] = UNWANTED_FILES,
) -> Path:
    """The hub's copy in the local cache; files that are there already are not downloaded again."""
    from huggingface_hub import snapshot_download  # slow to import, and a local folder never needs it

    with described_errors(name, revision):
        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=list(wanted),
                ignore_patterns=list(unwanted),
            )
        )


@contextlib.contextmanager
def described_errors(name: str, revision: str | None) -> Iterator[None]:
    """Raise CheckpointError for what the hub's errors mean."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    where = f"{name} at revision {revision}" if revision else name
    try:
        yield
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {name}, the model {where} is not in the local cache, and the hub cannot be reached. "
            "Check the network (and HF_HUB_OFFLINE), or name a folder that holds the model."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"the hub does not give the model {where}: {str(error).splitlines()[0]}. Check the name and the "
            "revision; a gated model needs its licence accepted and HF_TOKEN set."
        ) from error
