"""Options of LoRA adapters."""

import pytest

from jaxpaged.config.lora import LoRAConfig
from jaxpaged.errors import ConfigError


def test_host_memory_has_places_for_all_slots():
    assert LoRAConfig(max_loras=3).num_on_host == 3 and LoRAConfig(max_cpu_loras=9).num_on_host == 9
    with pytest.raises(ConfigError, match="max_cpu_loras 2 is below max_loras 3"):
        LoRAConfig(max_loras=3, max_cpu_loras=2)
    with pytest.raises(ConfigError, match="max_lora_rank is 9; it must be one of 1, 8, 16"):
        LoRAConfig(max_lora_rank=9)
