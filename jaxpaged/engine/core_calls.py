"""How a front end talks to an engine core, in this process or in another: requests, and calls of its other methods.

A call is plain data: the name of a method of `EngineCore` and its arguments, with the type of its result. So everything
between a user and the core forwards all calls alike: `EngineCoreClient.call`, the socket to another process, the HTTP
server's engine. To add one, write a class here, add it to `CALLS`, write the method, and one in `control.py` if users
are to have it. This module knows neither text nor devices.
"""

import re
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import msgspec

from jaxpaged.engine.merged_results import (
    merged_block_maps,
    merged_executor_stats,
    merged_snapshots,
    merged_stats,
    merged_steps,
)
from jaxpaged.errors import UsageError
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.messages import (
    EngineCoreRequest,
    EngineSnapshot,
    KVBlockMap,
    LoRAInfo,
    LoRARequest,
    SchedulerStats,
    StepRecord,
    WeightInfo,
)


class CoreCall[R](msgspec.Struct, forbid_unknown_fields=True):
    """A call of a method of `EngineCore` that returns an R. Its fields are the arguments."""

    changes_books: ClassVar[bool] = False
    """Whether an interrupt must not tear it apart."""
    runs_beside_steps: ClassVar[bool] = False
    """Whether it may take seconds and touches no step, so that steps can go on meanwhile."""
    only_tells: ClassVar[bool] = False
    """Whether it changes nothing: of several cores those answer that serve now. Any other call is for all of them."""

    desk: ClassVar[str] = ""
    """The attribute of `EngineCore` that answers, if it does not itself."""

    def for_core(self, number: int) -> Self:
        """What one of several cores is asked when all of them are."""
        return self

    def check(self) -> "CoreCall[None] | None":
        """What all of several cores are asked first: while one of them raises, none is asked the call itself."""
        return None

    def undone(self) -> "CoreCall[Any] | None":
        """What those of several cores are asked that have done it, where another one could not."""
        return None

    def mended(self) -> "CoreCall[Any] | None":
        """What a core is asked that could not do it, where others have."""
        return None

    def merged(self, results: Sequence[R]) -> R:
        """What several cores say together, of what each of them said; by default that all say the same."""
        return results[0]

    @classmethod
    def name(cls) -> str:
        """What it is called between processes, such as "reset_prefix_cache"."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def result_type(cls) -> Any:
        """R."""
        return typing.get_args(types.get_original_bases(cls)[0])[0]


class ResetPrefixCache(CoreCall[bool]):
    """See `EngineCore.reset_prefix_cache`."""

    changes_books = True

    reset_running_requests: bool = False

    def merged(self, results: Sequence[bool]) -> bool:
        return all(results)


class Sleep(CoreCall[SchedulerStats]):
    """See `EngineCore.sleep`; the result says how the core is afterwards."""

    changes_books = True

    level: int = 1
    mode: str = "abort"

    def merged(self, results: Sequence[SchedulerStats]) -> SchedulerStats:
        return merged_stats(results)


class WakeUp(CoreCall[SchedulerStats]):
    """See `EngineCore.wake_up`; the result says how the core is afterwards."""

    changes_books = True

    tags: Sequence[str] | None = None

    def merged(self, results: Sequence[SchedulerStats]) -> SchedulerStats:
        return merged_stats(results)


class IsSleeping(CoreCall[bool]):
    """Whether anything has to be woken before the next step; of several cores, in any of them."""

    only_tells = True

    def merged(self, results: Sequence[bool]) -> bool:
        return any(results)


class StartProfile(CoreCall[None]):
    """Begin to record what the devices do, into `folder`, or where options say. UsageError where that cannot be.

    Several cores have a folder each below it.
    """

    folder: str | None = None

    def for_core(self, number: int) -> Self:
        return self if self.folder is None else type(self)(folder_of_core(self.folder, number))


class StopProfile(CoreCall[None]):
    """Write the record. ConflictError when there is none."""

    runs_beside_steps = True


class WaitForPrograms(CoreCall[None]):
    """Block until every program is compiled."""

    runs_beside_steps = True


class ExecutorStats(CoreCall[dict[str, Any]]):
    """Counters of the executor: steps, padding, buckets, programs, recompiles."""

    only_tells = True

    def merged(self, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return merged_executor_stats(results)


class StepRecords(CoreCall[tuple[list[StepRecord], int]]):
    """The newest finished steps, oldest first, and how many before them are forgotten."""

    only_tells = True

    def merged(self, results: Sequence[tuple[list[StepRecord], int]]) -> tuple[list[StepRecord], int]:
        return merged_steps(results)


class BlockMap(CoreCall[KVBlockMap]):
    """Who holds which KV block now."""

    only_tells = True

    def merged(self, results: Sequence[KVBlockMap]) -> KVBlockMap:
        return merged_block_maps(results)


class Snapshot(CoreCall[EngineSnapshot]):
    """What the engine does now, with the steps after the first `since_step`. See `snapshot.py` for its bounds.

    The steps of several cores are counted together, so each of them tells its newest ones, however many are known.
    """

    only_tells = True

    since_step: int = 0

    def for_core(self, number: int) -> Self:
        return type(self)()

    def merged(self, results: Sequence[EngineSnapshot]) -> EngineSnapshot:
        return merged_snapshots(results)


class SavePrefix(CoreCall[PrefixInfo]):
    """Write what the prefix cache has of a text's beginning to a file. UsageError where that is not all of it."""

    path: str
    token_ids: Sequence[int]
    cache_salt: str | None = None
    lora: LoRAInfo | None = None


class LoadPrefix(CoreCall[PrefixInfo]):
    """Put the pages of such a file into the tiers. UsageError, and PageError for one that must not be used."""

    path: str


class KeepLease(CoreCall[None]):
    """A request may come with these `kv_transfer_params`; not `is_needed`: it will not come after all. All of several
    cores are told, of which one would have it. RequestError for params that cannot be."""

    params: Mapping[str, Any] = {}
    is_needed: bool = True


class AddLora(CoreCall[LoRAInfo]):
    """See `AdapterDesk.add_lora`."""

    desk = "adapters"
    runs_beside_steps = True

    lora_request: LoRARequest


class RemoveLora(CoreCall[bool]):
    """See `AdapterDesk.remove_lora`; of several cores, whether any of them had it."""

    desk = "adapters"
    changes_books = True

    lora_id: int

    def merged(self, results: Sequence[bool]) -> bool:
        return any(results)


class ListLoras(CoreCall[list[LoRAInfo]]):
    """Adapters that the core has, those that lie in files only among them; of several cores, those of any."""

    desk = "adapters"
    only_tells = True

    def merged(self, results: Sequence[list[LoRAInfo]]) -> list[LoRAInfo]:
        return list({info.lora_int_id: info for result in results for info in result}.values())


class PinLora(CoreCall[bool]):
    """See `AdapterDesk.pin_lora`; of several cores, whether all of them have it."""

    desk = "adapters"
    changes_books = True

    lora_id: int

    def merged(self, results: Sequence[bool]) -> bool:
        return all(results)


class RestoreLoras(CoreCall[None]):
    """See `AdapterDesk.restore_loras`."""

    desk = "adapters"
    changes_books = True

    infos: Sequence[LoRAInfo]


class CallExtension(CoreCall[list[Any]]):
    """See `EngineCore.call_extension`; of several cores, the results of one after the other."""

    method: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def merged(self, results: Sequence[list[Any]]) -> list[Any]:
        return [each for result in results for each in result]


class StartWeightUpdate(CoreCall[None]):
    """See `WeightUpdates`."""

    desk = "weights"

    is_partial: bool = False


class UpdateWeights(CoreCall[int]):
    """Files, folders or addresses; or arrays or a framework's tree, which are not sent to another process."""

    desk = "weights"
    runs_beside_steps = True

    weights: Any = ()
    mapping: str | None = None

    def undone(self) -> CoreCall[Any]:
        return TakeWeightsBack()


class TakeWeightsBack(CoreCall[None]):
    """See `WeightUpdates.take_weights_back`."""

    desk = "weights"


class AbandonWeightUpdate(CoreCall[None]):
    """See `WeightUpdates`."""

    desk = "weights"


class CheckWeightUpdate(CoreCall[None]):
    """See `WeightUpdates.check_weight_update`."""

    desk = "weights"


class FinishWeightUpdate(CoreCall[WeightInfo]):
    """Of several cores each has them when all have answered."""

    desk = "weights"
    changes_books = True

    version: str = ""

    def check(self) -> CoreCall[None]:
        return CheckWeightUpdate()

    def mended(self) -> CoreCall[Any]:
        return WakeUp(["weights"])

    def merged(self, results: Sequence[WeightInfo]) -> WeightInfo:
        return least_updated(results)


class AdoptWeights(CoreCall[WeightInfo]):
    """It holds arrays, so it is not sent to another process."""

    desk = "weights"
    changes_books = True

    tree: Any = None
    version: str = ""
    donate: bool = False


class GetWeightInfo(CoreCall[WeightInfo]):
    """Which weights compute now; of several cores, in the one that has taken the fewest updates: one that was replaced
    has those that it loaded."""

    desk = "weights"
    only_tells = True

    def merged(self, results: Sequence[WeightInfo]) -> WeightInfo:
        return least_updated(results)


class CollectiveRpc(CoreCall[list[Any]]):
    """Call a method of every worker, or a function with it; a result of each. It holds a function, so it is not sent
    to another process: see `CallExtension`. UsageError for an unknown name."""

    method: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


def least_updated(infos: Sequence[WeightInfo]) -> WeightInfo:
    """Of several cores that of the one with the fewest updates."""
    return min(infos, key=lambda info: info.num_updates)


def folder_of_core(folder: str, number: int) -> str:
    """Where one of several cores writes what all of them are to write to `folder`."""
    return str(Path(folder) / f"core{number}")


CALLS: dict[str, type[CoreCall[Any]]] = {
    call.name(): call
    for call in (
        AddLora,
        AbandonWeightUpdate,
        BlockMap,
        CallExtension,
        CheckWeightUpdate,
        ExecutorStats,
        FinishWeightUpdate,
        GetWeightInfo,
        IsSleeping,
        KeepLease,
        ListLoras,
        PinLora,
        RemoveLora,
        ResetPrefixCache,
        RestoreLoras,
        Sleep,
        Snapshot,
        StartProfile,
        StartWeightUpdate,
        StepRecords,
        StopProfile,
        TakeWeightsBack,
        UpdateWeights,
        WaitForPrograms,
        WakeUp,
    )
}
"""Those that another process may send, by name."""


def call_named(name: str, arguments: Mapping[str, Any]) -> CoreCall[Any]:
    """The call that another process asks for. Raises UsageError for one that does not exist, and for its arguments."""
    if name not in CALLS:
        raise UsageError(f"an engine core has no answer to {name!r}.")
    try:
        return msgspec.convert(arguments, CALLS[name])
    except msgspec.ValidationError as error:
        raise UsageError(f"{name} cannot be called so: {error}.") from None


class EngineCoreClient(Protocol):
    """What a front end may ask of an engine core: `EngineCore` answers in its process, and `CoreLink` for one in
    another process, where every result is awaited."""

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests. One that can never fit is refused: by a RequestError, or by a message from far away."""
        ...

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Stop requests at once, and say nothing more of them; those that are unknown or ended already pass."""
        ...

    def call[R](self, call: CoreCall[R]) -> R | Awaitable[R]:
        """The method's result. Raises what the core raises, and EngineDeadError once it has stopped."""
        ...
