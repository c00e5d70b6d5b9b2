"""What users may ask of an engine besides answers to prompts: its memory, its recordings, what it does and did.

Each is a method over one call of `core_calls.py`: `EngineControl` for `LLM` and `LLMEngine`, which wait for the result,
and `AsyncEngineControl` for `AsyncLLM` and the servers' engines, whose results are awaited. How a call reaches the core
is not known here.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxpaged.engine import core_calls
from jaxpaged.engine.adapters import Adapters, AsyncAdapters
from jaxpaged.engine.core_calls import CoreCall
from jaxpaged.errors import UsageError
from jaxpaged.messages import EngineSnapshot, KVBlockMap, LoRAInfo, LoRARequest, StepRecord, WeightInfo


class EngineControl(Protocol):
    """For callers that wait. `adapters` are those that were read for this front end."""

    adapters: Adapters

    def call[R](self, call: CoreCall[R]) -> R:
        """The result of the engine's core."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prompt beginnings; False while requests are under way, unless those that run are to be
        computed again."""
        return self.call(core_calls.ResetPrefixCache(reset_running_requests))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; programs stay, so waking compiles nothing.

        Level 0 only pauses. Level 1 frees the KV cache, forgets cached prompt beginnings, and moves the weights to the
        host's memory; on a CPU, where that is the device's own, it drops them, to be read from the checkpoint again.
        Level 2 drops them everywhere. `mode` is for requests under way, which only those have who step the engine
        themselves: "abort" ends them, "wait" finishes them first, "keep" lets them go on after waking. What sleep
        ended is returned by the next `step`. Raises UsageError.
        """
        self.call(core_calls.Sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: all of it, or what `tags` name ("weights", "kv_cache", "scheduling").

        Prompts are completed once all of it is back. An engine that is awake passes. Raises CheckpointError or
        CapacityError when weights or memory are gone; it can be tried again.
        """
        self.call(core_calls.WakeUp(tags))

    def is_sleeping(self) -> bool:
        """Whether anything has to be woken before prompts can be completed."""
        return self.call(core_calls.IsSleeping())

    def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """`sleep(0, mode)`: compute nothing until `resume_generation`, and keep all memory.

        `clear_cache`: forget what was computed of prompts, so that requests that are kept compute it again. Otherwise
        they go on over the keys and values that they have, even if the weights change meanwhile
        (`CompletionOutput.old_kv_from`); nobody else finds these then.
        """
        self.sleep(0, mode)
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        self.wake_up(["scheduling"])

    def start_weight_update(self, is_partial: bool = False) -> None:
        """Begin to send other weights; the engine serves those that it has until `finish_weight_update`. `is_partial`:
        parameters that are not sent stay. Raises UsageError for a model whose weights stay, ConflictError."""
        self.call(core_calls.StartWeightUpdate(is_partial))

    def update_weights(
        self, weights: Any, version: str = "", donate: bool = False, mapping: str | None = None
    ) -> WeightInfo:
        """Send weights: arrays by the checkpoint's names; the path of a safetensors file or of a folder of them, the
        address of a `WeightOffer` in another process, or several; or a tree like
        `apply_model(lambda params: params)[0]` with other arrays in it. Within an update that was begun they are a part
        of it, otherwise they are all of one, called `version`. Guide: guides/weight_updates.md.

        A tree is a whole update, and must be in this process. Of its arrays those that lie as the engine's do are taken
        without a copy: they are the caller's too, who must not donate them to a program, unless he gives them away
        (`donate`). `mapping`: the tree is of "tunix", "maxtext" or "nnx", or the path of orbax's checkpoint of it, or
        the address of an offer of it; it is copied, and may be a part.
        Raises CheckpointError for what does not fit and ServerError for an offer that cannot be pulled, and then the
        engine serves on as before.
        """
        if isinstance(weights, str | Path):
            weights = [str(weights)]
        elif isinstance(weights, list | tuple) and all(isinstance(each, str | Path) for each in weights):
            weights = [str(each) for each in weights]
        elif mapping is None and not isinstance(weights, Mapping):
            return self.call(core_calls.AdoptWeights(weights, version, donate))
        info = self.get_weight_info()
        if info.is_updating:
            self.call(core_calls.UpdateWeights(weights, mapping))
            return self.get_weight_info()
        self.start_weight_update()
        try:
            self.call(core_calls.UpdateWeights(weights, mapping))
            return self.finish_weight_update(version)
        except BaseException:
            self.abandon_weight_update()
            raise

    def abandon_weight_update(self) -> None:
        """Give up an update that was begun; the weights stay as they are."""
        self.call(core_calls.AbandonWeightUpdate())

    def finish_weight_update(self, version: str = "") -> WeightInfo:
        """Compute with the weights that were sent. Requests under way go on with them, from what they have said so far.
        Raises CheckpointError when some are missing: then the old ones stay, and more can be sent."""
        return self.call(core_calls.FinishWeightUpdate(version))

    def get_weight_info(self) -> WeightInfo:
        """Which weights compute now, and whether others come."""
        return self.call(core_calls.GetWeightInfo())

    def get_weight_version(self) -> str:
        """The name of the update that the weights are from; "" for those that the engine loaded."""
        return self.get_weight_info().version

    def start_profile(self, folder: str | None = None) -> None:
        """Record what the devices do, to `folder` or to the option `profile_dir`, for XProf and Perfetto.

        Raises ConflictError while a recording is under way, UsageError without a folder that can be written.
        """
        self.call(core_calls.StartProfile(folder))

    def stop_profile(self) -> None:
        """Write the recording. Raises ConflictError when there is none."""
        self.call(core_calls.StopProfile())

    def executor_stats(self) -> dict[str, Any]:
        """Counters of the executor: steps, padding, buckets, programs, recompiles."""
        return self.call(core_calls.ExecutorStats())

    def step_records(self) -> tuple[list[StepRecord], int]:
        """The newest finished steps, oldest first, and how many before them are forgotten."""
        return self.call(core_calls.StepRecords())

    def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        return self.call(core_calls.BlockMap())

    def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """Queues, blocks and newest steps at this moment, see `engine/observability/snapshot.py`."""
        return self.call(core_calls.Snapshot(since_step))

    def add_lora(self, lora_request: LoRARequest) -> LoRAInfo:
        """Read a LoRA adapter, so that the first request that names it need not wait. One that was read is read again
        only with `load_inplace`.

        Raises RequestError, and CheckpointError for files that are no adapter of the model.
        """
        return self.adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests under way finish with it. False where it is not there."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of all adapters that are there."""
        return {info.lora_int_id for info in self.call(core_calls.ListLoras())}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory whatever else is used. False where it is not there."""
        return self.call(core_calls.PinLora(lora_id))

    def wait_for_programs(self) -> None:
        """Block until every program is compiled: for tests and benchmarks; serving does not need it."""
        self.call(core_calls.WaitForPrograms())

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function with the worker as its first argument.

        There is one worker, which computes on all devices in this process: one result, and nothing is pickled. The
        worker is no public interface. Raises UsageError for an unknown name, and for a `timeout`: a call in the
        caller's own thread cannot be given up.
        """
        if timeout is not None:
            raise UsageError(f"timeout is {timeout!r}, but the worker answers in the caller's thread. Leave it out.")
        return self.call(core_calls.CollectiveRpc(method, args, kwargs or {}))

    def call_extension(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Any]:
        """Call a method that the worker extension declares (option `worker_extension_cls`); plain data of each worker.

        Raises UsageError for a name that it does not declare.
        """
        return self.call(core_calls.CallExtension(method, list(args), dict(kwargs)))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model's parameters, a tree of dataclasses with arrays of JAX; a list of one result.

        Raises ConflictError while the weights sleep.
        """
        return self.collective_rpc("apply_model", args=(func,))

    def dense_model(self) -> Any:
        """The engine's model on whole texts, with the parameters that `apply_model` gives, for trainers: a `DenseModel`
        of `models/dense_forward.py`, whose `logits` and `logprobs` can be differentiated. Guide: guides/training.md.

        Raises ConfigError for models that it does not take.
        """
        return self.collective_rpc("dense_model")[0]


class AsyncEngineControl(Protocol):
    """For callers in an event loop, with the core in another process. `adapters` as for `EngineControl`."""

    adapters: AsyncAdapters

    async def call[R](self, call: CoreCall[R]) -> R:
        """The result of the engine's core."""
        ...

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prompt beginnings; False while requests are under way, unless those that run are to be
        computed again."""
        return await self.call(core_calls.ResetPrefixCache(reset_running_requests))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; see `EngineControl.sleep`. Returns when it is free.

        Requests that come meanwhile wait, and are computed after waking. With "wait" the engine goes on until those
        under way are done, those of its other front ends too. A core that dies asleep is replaced by one that is awake.
        Raises UsageError, and ConflictError when `wake_up` came before it slept.
        """
        await self.call(core_calls.Sleep(level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back, all of it or what `tags` name; see `EngineControl.wake_up`."""
        await self.call(core_calls.WakeUp(tags))

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """See `EngineControl.pause_generation`."""
        await self.sleep(0, mode)
        if clear_cache:
            await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self.wake_up(["scheduling"])

    async def start_weight_update(self, is_partial: bool = False) -> None:
        """Begin to send other weights; see `EngineControl.start_weight_update`."""
        await self.call(core_calls.StartWeightUpdate(is_partial))

    async def update_weights(self, weights: Sequence[str], mapping: str | None = None) -> int:
        """Safetensors files, or folders of them, that the engine's processes can read, or addresses of a `WeightOffer`;
        with `mapping` the path of an orbax checkpoint of a framework's tree, or the address of an offer of one. Returns
        how many bytes have come. Raises CheckpointError, ServerError, UsageError, and ConflictError when no update was
        begun; then nothing of it is kept, and it can be sent again."""
        return await self.call(core_calls.UpdateWeights(list(weights), mapping))

    async def abandon_weight_update(self) -> None:
        """Give up an update that was begun; the weights stay as they are."""
        await self.call(core_calls.AbandonWeightUpdate())

    async def finish_weight_update(self, version: str = "") -> WeightInfo:
        """Compute with the weights that were sent; see `EngineControl.finish_weight_update`.

        Of several cores none does while one refuses. Raises EngineError where one is lost in the middle: it comes back
        with the weights that it loaded, and all need the update once more.
        """
        return await self.call(core_calls.FinishWeightUpdate(version or secrets.token_hex(16)))

    async def get_weight_info(self) -> WeightInfo:
        """Which weights compute now, and whether others come."""
        return await self.call(core_calls.GetWeightInfo())

    async def get_weight_version(self) -> str:
        """The name of the update that the weights are from; "" for those that the engine loaded."""
        return (await self.get_weight_info()).version

    async def is_sleeping(self) -> bool:
        """Whether anything has to be woken before requests are computed."""
        return await self.call(core_calls.IsSleeping())

    async def start_profile(self, folder: str | None = None) -> None:
        """Record what the devices do, to `folder` or to the option `profile_dir`. Raises UsageError, ConflictError."""
        await self.call(core_calls.StartProfile(folder))

    async def stop_profile(self) -> None:
        """Write what was recorded. Raises ConflictError when nothing is."""
        await self.call(core_calls.StopProfile())

    async def executor_stats(self) -> dict[str, Any]:
        """Counters of the executor: steps, padding, buckets, programs, recompiles."""
        return await self.call(core_calls.ExecutorStats())

    async def step_records(self) -> tuple[list[StepRecord], int]:
        """The newest finished steps, oldest first, and how many before them are forgotten."""
        return await self.call(core_calls.StepRecords())

    async def block_map(self) -> KVBlockMap:
        """Who holds which KV block now."""
        return await self.call(core_calls.BlockMap())

    async def snapshot(self, since_step: int = 0) -> EngineSnapshot:
        """Queues, blocks and newest steps at this moment, see `engine/observability/snapshot.py`."""
        return await self.call(core_calls.Snapshot(since_step))

    async def add_lora(self, lora_request: LoRARequest) -> LoRAInfo:
        """Read a LoRA adapter; see `EngineControl.add_lora`. Steps go on meanwhile."""
        return await self.adapters.add(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; see `EngineControl.remove_lora`."""
        return await self.adapters.remove(lora_id)

    async def list_loras(self) -> set[int]:
        """The numbers of all adapters that are there."""
        return {info.lora_int_id for info in await self.call(core_calls.ListLoras())}

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the host's memory whatever else is used. False where it is not there."""
        return await self.call(core_calls.PinLora(lora_id))

    async def wait_for_programs(self) -> None:
        """Wait until every program is compiled: for tests and benchmarks; serving does not need it."""
        await self.call(core_calls.WaitForPrograms())

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method that the worker extension declares (option `worker_extension_cls`), in every process that
        computes; a result of each. Arguments and results are plain data: nothing is pickled.

        Raises UsageError for a function, and for what the extension does not declare; TimeoutError after `timeout`
        seconds, though the workers go on.
        """
        if not isinstance(method, str):
            raise UsageError(
                f"collective_rpc was given {method!r}, but a function does not go to another process. Put a method "
                "into a class, and name that as worker_extension_cls."
            )
        async with asyncio.timeout(timeout):
            return await self.call_extension(method, args, kwargs or {})

    async def call_extension(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Any]:
        """Call what the worker extension declares; see `EngineControl.call_extension`."""
        return await self.call(core_calls.CallExtension(method, list(args), dict(kwargs)))
