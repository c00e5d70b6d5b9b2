"""Has LoRA adapters read beside the steps: those that users load, and those that requests wait for once more.

One thread reads them, one after the other. Which of them stay in host memory is the book's to decide
(`core/lora/book.py`), and the workers hear of it.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from jaxpaged.config import EngineConfig
from jaxpaged.config.lora import LoRAConfig
from jaxpaged.core.lora.book import AdapterBook
from jaxpaged.core.request_queue import AGES
from jaxpaged.errors import UsageError
from jaxpaged.executor.base import Workers
from jaxpaged.messages import LoRAInfo, LoRARequest


class AdapterDesk:
    """The adapters of an engine, in `book`, and the thread that reads them. `scheduling_policy`: who is the oldest."""

    def __init__(self, config: LoRAConfig, scheduling_policy: str, workers: Workers):
        self._workers = workers
        self._thread = ThreadPoolExecutor(1, "adapter reader")
        self.book = AdapterBook(
            config.max_loras, config.num_on_host, AGES[scheduling_policy], self._begin_read, workers.drop_lora
        )

    def add_lora(self, lora_request: LoRARequest) -> LoRAInfo:
        """Read an adapter, so that requests can have it, unless it is known. From any thread; one that is interrupted
        leaves it to be read. Raises RequestError, and what the workers raise, such as CheckpointError."""
        known = self.book.check_new(lora_request)
        return known or self._thread.submit(self._read_new, lora_request).result()

    def remove_lora(self, lora_id: int) -> bool:
        """Refuse new requests of an adapter; False if it is unknown. It is gone when those that have it end."""
        return self.book.remove(lora_id)

    def list_loras(self) -> list[LoRAInfo]:
        """All adapters that requests can have."""
        return self.book.infos()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory until it is removed; False if it is unknown. Raises UsageError."""
        return self.book.pin(lora_id)

    def restore_loras(self, infos: Sequence[LoRAInfo]) -> None:
        """Know these adapters, too: a core before this one had read them."""
        self.book.restore(infos)

    def _begin_read(self, request: LoRARequest) -> Future[LoRAInfo]:
        return self._thread.submit(self._workers.read_lora, request)

    def _read_new(self, request: LoRARequest) -> LoRAInfo:
        number = next(self.book.numbers)
        info = self._workers.read_lora(msgspec.structs.replace(request, lora_int_id=number))
        info = msgspec.structs.replace(info, lora_int_id=request.lora_int_id)
        self.book.come(info, number)
        return info

    def close(self) -> None:
        """End the thread, behind what it reads now."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def open_desk(config: EngineConfig, workers: Workers) -> AdapterDesk | None:
    """The adapters of an engine, if the options ask for some."""
    return AdapterDesk(config.lora, config.scheduler.scheduling_policy, workers) if config.lora.enable_lora else None


def given(desk: AdapterDesk | None) -> AdapterDesk:
    """The desk. Raises UsageError where there is none."""
    if desk is None:
        raise UsageError("this engine takes no LoRA adapters. Set enable_lora.")
    return desk
