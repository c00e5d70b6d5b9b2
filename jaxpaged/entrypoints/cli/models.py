"""`jaxpaged models`: the models in the local Hugging Face cache, and which of them this machine's memory can hold; or,
with `--supported`, all that could be served.

Everything is read from files: no network, and jax is not imported. What is compared is the size of the weights as they
are stored; a KV cache and temporaries come on top, which `jaxpaged plan` counts.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.machine import gibibytes, gpus, host_memory_bytes, num_tpu_chips
from jaxpaged.errors import CheckpointError

ROOM = 0.9
"""Share of the memory that an engine takes at most by default, `gpu_memory_utilization`."""
ASSETS = Path(__file__).parents[2] / "assets"
EMBEDDED = ("demo", "demo-vision")


@dataclass(frozen=True)
class CachedModel:
    """One model on this machine. `weights_bytes` counts its safetensors files, 0 where none is complete."""

    name: str
    architecture: str
    max_model_len: int | None
    weights_bytes: int
    fits: bool
    remark: str


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "models",
        help="models on this machine, and which fit it; or all that are known",
        epilog="A model fits when its weights take less than 90 % of the memory of one device: the largest GPU, or the "
        "host.\nA KV cache comes on top: jaxpaged plan MODEL --target h100 counts it. Nothing is downloaded.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--supported", action="store_true", help="list architectures, their models and formats of weights"
    )
    which.add_argument("--download-dir", metavar="FOLDER", help="where hub downloads are kept, if not in their cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns the exit status."""
    if args.supported:
        from jaxpaged.entrypoints.cli.supported import print_supported

        print_supported(args.json)
        return 0
    device, memory = largest_device()
    embedded = [described(name, ASSETS / name, memory) for name in EMBEDDED]
    models = [*embedded, *cached_models(args.download_dir, memory)]
    if args.json:
        for model in models:
            print(json.dumps(asdict(model)))
        return 0
    print(f"{device}: {gibibytes(memory)}, of which {gibibytes(ROOM * memory)} may be used" if memory else device)
    width = max(len(model.name) for model in models)
    for model in models:
        size = gibibytes(model.weights_bytes) if model.weights_bytes else "-"
        verdict = model.remark or ("fits" if model.fits else "too large")
        print(f"{model.name:<{width}}  {size:>9}  {verdict:<24}  {model.architecture}".rstrip())
    return 0


def largest_device() -> tuple[str, int]:
    """The device whose memory counts, in words, and its bytes; 0 where only jax could say."""
    if found := gpus():
        return max(found, key=lambda gpu: gpu[1])
    if chips := num_tpu_chips():
        return f"{chips} TPU chips, whose memory jaxpaged plan knows", 0
    return "this host", host_memory_bytes()


def cached_models(folder: str | None, memory: int) -> list[CachedModel]:
    """The newest snapshot of every model in the cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(folder)
    except (CacheNotFound, ValueError):
        return []
    models = []
    for repository in sorted(cache.repos, key=lambda repository: repository.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            models.append(described(repository.repo_id, newest.snapshot_path, memory))
    return models


def described(name: str, folder: Path, memory: int) -> CachedModel:
    """What the files of a model say. A damaged model is described as such."""
    from jaxpaged.params.mistral_folder import description_of  # with numpy
    from jaxpaged.params.other_formats import is_mistral_folder

    is_native = is_mistral_folder(folder)
    try:
        config = (description_of if is_native else read_config)(folder)
        architecture = (config.get("architectures") or ["?"])[0]
        length = config.get("max_position_embeddings")
    except CheckpointError:
        return CachedModel(name, "?", None, 0, False, "params.json not known")
    except (OSError, ValueError, AttributeError, LookupError):
        return CachedModel(name, "?", None, 0, False, "no config.json")
    weights, missing = weights_of(folder, is_native)
    remark = f"{missing} files of weights missing" if missing else "" if weights else "no safetensors"
    if not remark and not memory:
        remark = "see jaxpaged plan"
    return CachedModel(name, architecture, length, weights, not remark and weights <= ROOM * memory, remark)


def read_config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def weights_of(folder: Path, is_native: bool) -> tuple[int, int]:
    """(bytes of the safetensors files, how many that their index names are missing). `is_native`: of those in Mistral's
    own format, which other folders may have, too."""
    named = {path.name for path in folder.glob("*.safetensors") if path.name.startswith("consolidated") == is_native}
    stem = "consolidated" if is_native else "model"
    try:
        index = json.loads((folder / f"{stem}.safetensors.index.json").read_text(encoding="utf-8"))
        named = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, AttributeError):
        pass  # a single file, or no weights
    present = [folder / name for name in named if (folder / name).exists()]
    return sum(path.stat().st_size for path in present), len(named) - len(present)
