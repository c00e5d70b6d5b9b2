"""Options of LoRA adapters."""

import pytest

from jaxpaged.config.lora import LoRAConfig, check_adapters
from jaxpaged.errors import ConfigError


def test_adapters_are_read_in_one_process():
    check_adapters(LoRAConfig(enable_lora=True), 1)
    check_adapters(LoRAConfig(), 2)
    with pytest.raises(ConfigError, match="2 processes compute as one.*Let one process compute, or merge"):
        check_adapters(LoRAConfig(enable_lora=True), 2)


def test_host_memory_has_places_for_all_slots():
    assert LoRAConfig(max_loras=3).num_on_host == 3 and LoRAConfig(max_cpu_loras=9).num_on_host == 9
    with pytest.raises(ConfigError, match="max_cpu_loras 2 is below max_loras 3"):
        LoRAConfig(max_loras=3, max_cpu_loras=2)
    with pytest.raises(ConfigError, match="max_lora_rank is 9; it must be one of 1, 8, 16"):
        LoRAConfig(max_lora_rank=9)
