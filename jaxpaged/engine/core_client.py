"""How a front end talks to an engine core: one protocol, whether the core lives in this process or in another.

This module knows neither text nor devices.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxpaged.engine.core import EngineCore
from jaxpaged.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineSnapshot,
    KVBlockMap,
    SchedulerStats,
    StepRecord,
)


class EngineCoreClient(Protocol):
    """What a front end may ask of an engine core."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises RequestError when it can never fit."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests; those that ended already pass."""
        ...

    def get_output(self) -> EngineCoreOutputs:
        """What the next step gives. Raises EngineDeadError when the core has stopped."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt beginnings; False while requests hold blocks."""
        ...

    def executor_stats(self) -> dict[str, Any]:
        """Counters of the executor: steps, programs, recompiles."""
        ...

    def step_records(self) -> tuple[list[StepRecord], int]:
        """The newest finished steps, oldest first, and how many before them are forgotten."""
        ...

    def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        ...

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """`EngineCore.snapshot`."""
        ...

    def wait_for_programs(self) -> None:
        """Block until every program is compiled."""
        ...

    def sleep(self, level: int = 1, mode: str = "abort") -> SchedulerStats:
        """`EngineCore.sleep`; returns how the core is afterwards."""
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> SchedulerStats:
        """`EngineCore.wake_up`; returns how the core is afterwards."""
        ...

    def is_sleeping(self) -> bool:
        """Whether anything has to be woken before the next step."""
        ...

    def start_profile(self, folder: str | None = None) -> None:
        """Record what the devices do. Raises UsageError."""
        ...

    def stop_profile(self) -> None:
        """Write what was recorded. Raises ConflictError."""
        ...

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        """Call a method of every worker, or a function with it. Raises UsageError for an unknown name."""
        ...

    def shutdown(self) -> None:
        """Release the devices."""
        ...


class InprocClient:
    """An engine core in this process: asking for output runs one step."""

    def __init__(self, core: EngineCore):
        self._core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._core.abort_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs:
        return self._core.step()

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def executor_stats(self) -> dict[str, Any]:
        return self._core.executor_stats()

    def step_records(self) -> tuple[list[StepRecord], int]:
        return self._core.step_log.read()

    def block_map(self) -> KVBlockMap:
        return self._core.block_map()

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        return self._core.snapshot(since_step)

    def wait_for_programs(self) -> None:
        self._core.wait_for_programs()

    def sleep(self, level: int = 1, mode: str = "abort") -> SchedulerStats:
        self._core.sleep(level, mode)
        return self._core.stats()

    def wake_up(self, tags: Sequence[str] | None = None) -> SchedulerStats:
        self._core.wake_up(tags)
        return self._core.stats()

    def is_sleeping(self) -> bool:
        return self._core.sleep_level is not None

    def start_profile(self, folder: str | None = None) -> None:
        self._core.start_profile(folder)

    def stop_profile(self) -> None:
        self._core.stop_profile()

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        return self._core.collective_rpc(method, args, kwargs)

    def shutdown(self) -> None:
        self._core.shutdown()
