"""Several processes that compute as one, each with devices of its own: the executor of the one that drives.

It schedules nothing twice: what it dispatches here is what it has told the others to dispatch. See `group.py`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.errors import CheckpointError, EngineDeadError, EngineError, UsageError
from jaxpaged.executor.base import PendingOutput
from jaxpaged.executor.group import Group
from jaxpaged.executor.group_messages import DropLoRA, Sample, Step
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.messages import LoRAInfo, LoRARequest, ModelRunnerOutput, ProgramKey, Progress, SchedulerOutput
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.worker.programs.choose import Readiness
from jaxpaged.worker.worker import Worker


class ReadyEverywhere:
    """A `Readiness`: of the programs of all processes."""

    def __init__(self, own: Readiness, group: Group):
        self._own, self._group = own, group

    def is_ready(self, key: ProgramKey) -> bool:
        if self._own.is_ready(key) and self._group.is_ready(key):
            return True
        self._group.want(key, hurry=False)
        return False

    def has(self, key: ProgramKey) -> bool:
        return self._own.has(key) and self._group.is_ready(key)

    def prepare(self, key: ProgramKey) -> bool:
        if self._own.prepare(key) and self._group.is_ready(key):
            return True
        self._group.want(key, hurry=True)
        return False

    def smallest_ready(self, kind: str, size: int, buckets: Sequence[int]) -> int:
        everywhere = [bucket for bucket in buckets if self._group.is_ready(ProgramKey(kind, bucket))]
        fits = bool(everywhere) and everywhere[-1] >= size
        return self._own.smallest_ready(kind, size, everywhere if fits else buckets)

    def largest_usable(self, kind: str, buckets: Sequence[int]) -> int:
        everywhere = (bucket for bucket in reversed(buckets) if self._group.is_ready(ProgramKey(kind, bucket)))
        return next(everywhere, 0) or self._own.largest_usable(kind, buckets)

    def miss(self, key: ProgramKey, num_tokens: int) -> None:
        self._own.miss(key, num_tokens)

    def miss_seconds(self, key: ProgramKey, seconds: float) -> None:
        self._own.miss_seconds(key, seconds)


class GroupStep:
    """A `PendingOutput`: a step that was dispatched everywhere."""

    def __init__(self, own: PendingOutput, group: Group):
        self._own, self._group = own, group

    def result(self) -> ModelRunnerOutput:
        try:
            return self._own.result()
        except EngineError as error:  # where somebody else has ended, that is the reason
            self._group.fail_soon(EngineDeadError(f"rank 0: {error}"))
            raise

    def drafts(self) -> list[list[int]]:
        return self._own.drafts()


class Everybody:
    """All workers of a group as one: see `executor.base.Workers`. Only the driver's devices are profiled."""

    def __init__(self, own: Worker, group: Group):
        self._own, self._group = own, group
        self.start_profile, self.stop_profile = own.start_profile, own.stop_profile

    def sleep(self, discard: bool) -> None:
        self._ask("sleep", discard)

    def wake_up(self, part: str) -> None:
        self._ask("wake_up", part)

    def read_lora(self, request: LoRARequest) -> LoRAInfo:
        """See `Group.read_lora`. What one cannot read, none keeps."""
        try:
            return self._group.read_lora(request, lambda: self._own.read_lora(request))
        except BaseException:
            self.drop_lora(request.lora_int_id)
            raise

    def drop_lora(self, lora_int_id: int) -> None:
        self._own.drop_lora(lora_int_id)
        with contextlib.suppress(EngineDeadError):  # nobody is left who has it
            self._group.tell(DropLoRA(lora_int_id))

    def start_weight_update(self, is_partial: bool) -> None:
        self._ask("start_weight_update", is_partial)

    def receive_weights(self, weights: Any, mapping: str | None) -> int:
        if not isinstance(weights, Sequence):
            raise UsageError(
                "several processes compute, and arrays are in one of them. Give files that all can read, or offer the "
                "arrays to them (WeightOffer)."
            )
        try:
            num_bytes = self._ask("receive_weights", weights, mapping, beside=True)
            self._check_alike()
            return num_bytes
        except BaseException:
            self.take_weights_back()
            raise

    def _check_alike(self) -> None:
        """Raise CheckpointError unless all have received the same."""
        own, *others = self._group.ask("sums_of_weights", (), self._own.sums_of_weights, returns=True, beside=True)
        for rank, theirs in zip(self._group.ranks, others, strict=True):
            if differing := sorted({name for name, _ in own.items() ^ theirs.items()}):
                raise CheckpointError(
                    f"{self._group.name(rank)} has read other weights than rank 0: {len(differing)} tensors differ, "
                    f"the first is {differing[0]}. Copy the same files to all hosts."
                )

    def take_weights_back(self) -> int:
        return self._ask("take_weights_back", beside=True)

    def abandon_weight_update(self) -> None:
        self._ask("abandon_weight_update")

    def check_weight_update(self) -> None:
        self._ask("check_weight_update")

    def make_room_for_update(self) -> None:
        self._ask("make_room_for_update")

    def finish_weight_update(self, label: str) -> None:
        self._ask("finish_weight_update", label)

    def wait_for_programs(self) -> None:
        self._ask("wait_for_programs")

    def stats(self) -> dict[str, Any]:
        return {**self._own.stats(), "num_processes": len(self._group.ranks) + 1}

    def _ask(self, method: str, *args: Any, beside: bool = False) -> Any:
        """What the own worker returns."""
        return self._group.ask(method, args, lambda: getattr(self._own, method)(*args), beside=beside)[0]


class MultiProcExecutor:
    """An `Executor` over the devices of all processes of `group`, which have joined."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        decoder: DecoderConfig,
        folder: Path | None,
        group: Group,
        progress: Progress | None = None,
    ):
        self._group = group
        everywhere: Callable[[Readiness], Readiness] = lambda programs: ReadyEverywhere(programs, group)
        self._own = UniProcExecutor(config, model, decoder, folder, progress, group.settle_blocks, everywhere)
        self.kv_cache_config = self._own.kv_cache_config
        self.encoder_cache_config = self._own.encoder_cache_config
        self.workers = Everybody(self._own.worker, group)
        self.max_step_tokens, self.max_decode_steps = self._own.max_step_tokens, self._own.max_decode_steps
        self.can_run = self._own.can_run
        group.wait_until_loaded()

    def execute_model(self, scheduler_output: SchedulerOutput) -> GroupStep:
        scheduler_output.programs = self._own.choice.choose(scheduler_output)
        self._group.wait_until_ready(scheduler_output.programs.keys)
        self._group.tell(Step(scheduler_output))
        try:
            return GroupStep(self._own.worker.runner.execute_model(scheduler_output), self._group)
        except BaseException as error:  # the others wait for this process in the middle of a program
            self._group.fail(EngineDeadError(f"rank 0 could not dispatch a step: {error}"))
            raise

    def sample_tokens(self, masks_NW: np.ndarray) -> GroupStep:
        self._group.tell(Sample(masks_NW))
        return GroupStep(self._own.sample_tokens(masks_NW), self._group)

    @property
    def token_buckets(self) -> Sequence[int]:
        return self._own.token_buckets

    @property
    def weights_version(self) -> str:
        return self._own.weights_version

    @property
    def weights_label(self) -> str | None:
        return self._own.weights_label

    def recover(self) -> None:
        """Raises EngineDeadError: what the others have left of a failed step is not known, so all start anew."""
        self._group.fail(EngineDeadError("a step failed on the devices of rank 0"))
        self._group.check()

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        """Call a method of the worker extension in every process; their results, by rank. Raises UsageError for
        anything else: functions do not go to other processes."""
        if method != "call_extension":
            raise UsageError(
                "several processes compute, and functions do not go from one to another. Call a method that a class "
                "declares: worker_extension_cls."
            )
        return self._group.ask(method, args, lambda: self._own.collective_rpc(method, args, kwargs)[0], returns=True)

    def shutdown(self) -> None:
        self._group.close()
        self._own.shutdown()
