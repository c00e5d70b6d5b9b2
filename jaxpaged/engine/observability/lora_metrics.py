"""Metrics of LoRA adapters. An engine that takes none has none of these."""

import time

from jaxpaged.engine.observability.metrics_types import Counter, Gauge
from jaxpaged.messages import LoRAStats, SchedulerStats


def lora_info(stats: SchedulerStats) -> list[Gauge]:
    """The adapters with running and with waiting requests, by name; its value is the time, as vLLM has it."""
    if (lora := stats.lora) is None:
        return []
    labels = {
        "max_lora": str(lora.max_loras),
        "running_lora_adapters": ",".join(lora.running),
        "waiting_lora_adapters": ",".join(lora.waiting),
    }
    return [Gauge("vllm:lora_requests_info", labels, time.time())]


def lora_counters(stats: SchedulerStats) -> list[Counter]:
    """How adapters moved: into slots of the devices and out of them; and where requests found theirs."""
    if (lora := stats.lora) is None:
        return []
    names = (name for name in LoRAStats.__struct_fields__ if name.startswith("num_"))
    return [Counter(f"jaxpaged:lora_{name.removeprefix('num_')}", {}, getattr(lora, name)) for name in names]
