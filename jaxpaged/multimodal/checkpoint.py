"""What a model's folder says of pictures: its two JSON files, and a name for the model that is the same everywhere."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxpaged.config.hf_overrides import overridden
from jaxpaged.encoding.cbor import encode_cbor
from jaxpaged.multimodal.processors import FAMILIES, OF_VIDEOS, load_settings, read_object

NUM_SAMPLES, SAMPLE_BYTES = 16, 4096


class PictureConfigs(NamedTuple):
    """config.json, and what describes the processor."""

    model: dict[str, Any]
    processor: dict[str, Any]


def picture_configs(folder: Path, overrides: Mapping[str, Any] | None = None) -> PictureConfigs | None:
    """None: the model takes text only. Raises CheckpointError for files that cannot be read, and
    ConfigError for fields that cannot be replaced."""
    config = overridden(read_object(folder / "config.json") or {}, overrides or {})
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES or not config.get("vision_config"):
        return None
    return PictureConfigs(config, load_settings(folder))


def model_identity(folder: Path, configs: PictureConfigs) -> str:
    """A name of the checkpoint by its content, not by where it lies: its configuration, and samples of its weights.
    What it says of videos is in their keys."""
    of_pictures = {name: value for name, value in configs.processor.items() if name != OF_VIDEOS}
    digest = hashlib.sha256(json.dumps([configs.model, of_pictures], sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(encode_cbor([path.name, size]))
        with path.open("rb") as file:
            for number in range(NUM_SAMPLES):
                file.seek(number * size // NUM_SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
