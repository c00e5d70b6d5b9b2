"""A folder like the demo model that sees, without weights, and with the pictures of Gemma 3, for benchmarks."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxpaged

DEMO_VISION = Path(jaxpaged.__file__).parent / "assets" / "demo-vision"
SIDE, PATCH, NUM_EMBEDS = 896, 14, 256
PREPROCESSOR = {"size": {"height": SIDE, "width": SIDE}, "image_seq_length": NUM_EMBEDS}


def write_seeing_folder(
    folder: Path, text: Mapping[str, Any] | None = None, vision: Mapping[str, Any] | None = None
) -> Path:
    """The demo's tokenizer and template. `text` and `vision`: what config.json says else of these parts."""
    for file in DEMO_VISION.iterdir():
        if file.suffix in (".json", ".jinja") and "safetensors" not in file.name:
            shutil.copy(file, folder)
    config, processor = folder / "config.json", folder / "preprocessor_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values["text_config"] |= text or {}
    values["vision_config"] |= {"image_size": SIDE, "patch_size": PATCH, **(vision or {})}
    values["mm_tokens_per_image"] = NUM_EMBEDS
    config.write_text(json.dumps(values), encoding="utf-8")
    processor.write_text(json.dumps(json.loads(processor.read_text(encoding="utf-8")) | PREPROCESSOR), encoding="utf-8")
    return folder
