"""The pixels of pictures and videos to what an encoder takes, by model family. `base.py` has what they share;
`processor_of` chooses.

To add a family: a module with a class as `base.Processor` describes it, and its model types in `FAMILIES`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxpaged.errors import CheckpointError, ConfigError, RequestError, shown
from jaxpaged.multimodal.processors.base import BadSetting, Processor
from jaxpaged.multimodal.processors.gemma3 import Gemma3Processor
from jaxpaged.multimodal.processors.gemma4 import Gemma4Processor
from jaxpaged.multimodal.processors.pixtral import PixtralProcessor
from jaxpaged.multimodal.processors.qwen_vl import OF_VIDEOS, QwenVLProcessor

FAMILIES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Processor]] = {
    "gemma3": Gemma3Processor,
    "gemma4": Gemma4Processor,
    "llava": PixtralProcessor,
    "mistral3": PixtralProcessor,
    "qwen2_vl": QwenVLProcessor,
    "qwen2_5_vl": QwenVLProcessor,
    "qwen3_vl": QwenVLProcessor,
    "qwen3_vl_moe": QwenVLProcessor,
}
"""By `model_type` of config.json."""


def processor_of(config: Mapping[str, Any], preprocessor_config: Mapping[str, Any]) -> Processor:
    """The processor of a model with this config.json and preprocessor_config.json. Raises CheckpointError."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"config.json has model_type {shown(model_type)}, for which no picture processor is known. "
            f"Known are {', '.join(FAMILIES)}."
        )
    try:
        return family(config, preprocessor_config)
    except BadSetting as problem:
        raise CheckpointError(f"preprocessor_config.json or config.json cannot be used: {problem}.") from None


PREPROCESSOR_CONFIG = "preprocessor_config.json"
VIDEO_CONFIG = "video_preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"
"""What newer releases of transformers write, with the same under keys of it."""


def load_processor(folder: Path, config: Mapping[str, Any], options: Mapping[str, Any]) -> Processor:
    """The processor of the model in `folder`, whose config.json is `config`. `options`: `mm_processor_kwargs`.

    Raises CheckpointError for files that cannot be used, and ConfigError for options.
    """
    return with_engine_options(processor_of(config, load_settings(folder)), options)


def with_engine_options(processor: Processor, options: Mapping[str, Any]) -> Processor:
    """The processor with the `mm_processor_kwargs` of an engine. Raises ConfigError."""
    try:
        return processor.with_options(options, "mm_processor_kwargs") if options else processor
    except RequestError as error:
        raise ConfigError(str(error)) from None


def load_settings(folder: Path) -> dict[str, Any]:
    """What a model's folder says of its processor; nothing where all is as the family has it. Raises
    CheckpointError."""
    settings = read_object(folder / PREPROCESSOR_CONFIG)
    if settings is None:
        whole = read_object(folder / PROCESSOR_CONFIG) or {}
        settings = whole.get("image_processor") or {}
        if not isinstance(settings, dict):
            raise CheckpointError(f"{folder / PROCESSOR_CONFIG} has an image_processor that is no JSON object.")
        of_videos = whole.get(OF_VIDEOS)
    else:
        of_videos = None
    of_videos = of_videos or read_object(folder / VIDEO_CONFIG)
    return settings if of_videos is None else {**settings, OF_VIDEOS: of_videos}


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object of a file; None: there is no such file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Download it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object. Download it again.")
    return value
