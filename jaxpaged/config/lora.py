"""LoRA adapters (arXiv 2106.09685) that requests name beside the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.config.option_checks import option
from jaxpaged.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ADAPTER_CONFIG = "adapter_config.json"
MOST_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class LoRAConfig:
    """How many adapters there are where, and how large. Names and defaults are vLLM's."""

    enable_lora: bool = option(False, "take requests that name a LoRA adapter")
    max_loras: int = option(1, "adapters that a step may have, each in a slot of the devices", minimum=1)
    max_lora_rank: int = option(
        16, f"largest rank of an adapter: one of {', '.join(map(str, RANKS))}", minimum=1, maximum=512
    )
    max_cpu_loras: int | None = option(
        None, "adapters that lie in the host's memory (default: max_loras); the one used longest ago leaves", minimum=1
    )
    lora_dtype: str = option(
        "auto",
        "type of adapters on the devices: the model's, or another",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    lora_target_modules: tuple[str, ...] = option(
        (),
        "modules that adapters may adapt, such as q_proj; default: all-linear, which are all of the layers'; "
        "embed_tokens and lm_head may be named beside",
        several=True,
    )
    enable_tower_connector_lora: bool = option(
        False, "adapters may adapt what makes embeddings of pictures, too: the tower, and what follows it"
    )

    def __post_init__(self) -> None:
        if self.max_lora_rank not in RANKS:
            raise ConfigError(f"max_lora_rank is {self.max_lora_rank}; it must be one of {', '.join(map(str, RANKS))}.")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"max_cpu_loras {self.max_cpu_loras} is below max_loras {self.max_loras}, but what is on the devices "
                "comes from the host's memory; give as many at least."
            )
        if self.enable_tower_connector_lora and not self.enable_lora:
            raise ConfigError("enable_tower_connector_lora is given without enable_lora. Set both, or neither.")

    @property
    def num_on_host(self) -> int:
        """Adapters that lie in the host's memory, at most."""
        return self.max_cpu_loras or self.max_loras


def adapter_config(folder: Path) -> dict[str, Any]:
    """What an adapter says of itself; nothing where that cannot be seen: reading the adapter says why."""
    try:
        file = folder / ADAPTER_CONFIG
        if file.stat().st_size > MOST_CONFIG_BYTES:
            return {}
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
