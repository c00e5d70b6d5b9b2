"""Makes the folder of a model that is a GGUF file, once, and says where its matrices lie.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json   what the file says
    modules.json, 1_Pooling/config.json                                          how an encoder's states are pooled
    vectors.safetensors                                                          norms and biases
    places.json                                                                  where matrices lie
    model.gguf, or its parts                                                     links to the file

It is named by what the system says of the file, so another file has another folder. Old ones are removed
(`keeping.py`).
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.gguf.reader import GgufHeader, read_gguf
from jaxpaged.params.gguf_folder.architectures import architecture_of
from jaxpaged.params.gguf_folder.description import config_fields, token_ids
from jaxpaged.params.gguf_folder.encoder_fields import pooling_files
from jaxpaged.params.gguf_folder.facts import Facts
from jaxpaged.params.gguf_folder.keeping import MAKING, held, identity, remove_old
from jaxpaged.params.gguf_folder.places import Place, modules_of, places_and_vectors
from jaxpaged.params.gguf_folder.places_file import PLACES, VECTORS
from jaxpaged.params.gguf_folder.tokenizer import tokenizer_files
from jaxpaged.params.safetensors_writer import safetensors_of


def make_folder(path: Path, cache: Path | None = None) -> Path:
    """The folder of the model in a file, or in parts of which it is one; made if it is not there, in `cache`, or in the
    user's. Raises CheckpointError."""
    try:
        header = read_gguf(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist. Name a GGUF file.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{error}. Download the file again, or serve the safetensors version.") from error
    cache = cache or default_cache()
    folder = cache / f"{path.stem[:60]}-{identity(header.paths)}"
    if held(folder):
        return folder
    files = contents(header)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        remove_old(cache)
        made = Path(tempfile.mkdtemp(dir=cache, prefix=MAKING))
    except OSError as error:
        raise CheckpointError(
            f"{cache} cannot be written ({error.strerror}), where the description of {path.name} is kept. Make it "
            "writable, or set XDG_CACHE_HOME to another folder."
        ) from None
    for name, data in files.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_bytes(data)
    for part in header.paths:
        (made / part.name).symlink_to(part.resolve())
    made.chmod(0o755)
    try:
        made.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    if not held(folder):
        raise CheckpointError(f"{folder} was removed while it was made. Start again.")
    return folder


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpaged" / "gguf"


def contents(header: GgufHeader) -> dict[str, bytes]:
    """File name -> what is in it. Raises CheckpointError for a model that is not read."""
    facts = Facts(header)
    architecture = architecture_of(facts)
    places, vectors = places_and_vectors(facts, architecture)
    config = config_fields(facts, architecture, modules_of(places))
    facts.refuse_unread()
    described = {
        "config.json": config,
        "generation_config.json": token_ids(facts),
        PLACES: {place.name: facts_of(place) for place in places},
        **tokenizer_files(facts, architecture.pools_only),
        **(pooling_files(facts) if architecture.pools_only else {}),
    }
    files = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in described.items()}
    return {**files, VECTORS: b"".join(safetensors_of(vectors))}


def facts_of(place: Place) -> list[Any]:
    """What `gguf_entries` makes a tensor of."""
    return [place.tensor.path.name, place.tensor.type.name, place.shape, place.begin, place.num_bytes]
