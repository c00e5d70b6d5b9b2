"""What can be asked of an engine core besides requests: every call is declared here, once, with the type of its answer.

A call is plain data and says itself what the core does for it, so whatever lies between who asks and the core forwards
all calls alike: `EngineCoreClient.call`, the socket to another process, the HTTP server's engine. Whoever adds one
writes a class here, adds it to `CALLS`, and gives it a method in `control.py` if users are to have it.
"""

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from jaxpaged.engine.merged_answers import (
    merged_block_maps,
    merged_executor_stats,
    merged_snapshots,
    merged_stats,
    merged_steps,
)
from jaxpaged.errors import UsageError
from jaxpaged.kv_store.prefix_file import PrefixInfo
from jaxpaged.kv_store.transfer_params import PARAMS, source_of, transfer_params
from jaxpaged.messages import EngineSnapshot, KVBlockMap, SchedulerStats, StepRecord

if TYPE_CHECKING:
    from jaxpaged.engine.core import EngineCore


class CoreCall[R](msgspec.Struct, forbid_unknown_fields=True):
    """A call whose answer is an R. Its fields are the arguments."""

    changes_books: ClassVar[bool] = False
    """Whether an interrupt must not tear it apart."""
    runs_beside_steps: ClassVar[bool] = False
    """Whether it may take seconds and touches no step, so that steps can go on meanwhile."""
    only_tells: ClassVar[bool] = False
    """Whether it changes nothing: of several cores those answer that serve now. Any other call is for all of them."""

    def answer(self, core: "EngineCore") -> R:
        """Do it."""
        raise NotImplementedError

    def for_core(self, number: int) -> Self:
        """What one of several cores is asked when all of them are."""
        return self

    def merged(self, answers: Sequence[R]) -> R:
        """What several cores say together, of what each of them said; by default that all say the same."""
        return answers[0]

    @classmethod
    def name(cls) -> str:
        """What it is called between processes, such as "reset_prefix_cache"."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def answer_type(cls) -> Any:
        """R."""
        return typing.get_args(types.get_original_bases(cls)[0])[0]


class ResetPrefixCache(CoreCall[bool]):
    """See `EngineCore.reset_prefix_cache`."""

    changes_books = True

    reset_running_requests: bool = False

    def answer(self, core: "EngineCore") -> bool:
        return core.reset_prefix_cache(self.reset_running_requests)

    def merged(self, answers: Sequence[bool]) -> bool:
        return all(answers)


class Sleep(CoreCall[SchedulerStats]):
    """See `EngineCore.sleep`; the answer says how the core is afterwards."""

    changes_books = True

    level: int = 1
    mode: str = "abort"

    def answer(self, core: "EngineCore") -> SchedulerStats:
        core.sleep(self.level, self.mode)
        return core.stats()

    def merged(self, answers: Sequence[SchedulerStats]) -> SchedulerStats:
        return merged_stats(answers)


class WakeUp(CoreCall[SchedulerStats]):
    """See `EngineCore.wake_up`; the answer says how the core is afterwards."""

    changes_books = True

    tags: Sequence[str] | None = None

    def answer(self, core: "EngineCore") -> SchedulerStats:
        core.wake_up(self.tags)
        return core.stats()

    def merged(self, answers: Sequence[SchedulerStats]) -> SchedulerStats:
        return merged_stats(answers)


class IsSleeping(CoreCall[bool]):
    """Whether anything has to be woken before the next step; of several cores, in any of them."""

    only_tells = True

    def answer(self, core: "EngineCore") -> bool:
        return core.sleep_level is not None

    def merged(self, answers: Sequence[bool]) -> bool:
        return any(answers)


class StartProfile(CoreCall[None]):
    """Begin to record what the devices do, into `folder`, or where options say. UsageError where that cannot be.

    Several cores have a folder each below it.
    """

    folder: str | None = None

    def for_core(self, number: int) -> Self:
        return self if self.folder is None else type(self)(folder_of_core(self.folder, number))

    def answer(self, core: "EngineCore") -> None:
        core.executor.workers.start_profile(self.folder)


class StopProfile(CoreCall[None]):
    """Write the record. ConflictError when there is none."""

    runs_beside_steps = True

    def answer(self, core: "EngineCore") -> None:
        core.executor.workers.stop_profile()


class WaitForPrograms(CoreCall[None]):
    """Block until every program is compiled."""

    runs_beside_steps = True

    def answer(self, core: "EngineCore") -> None:
        core.executor.workers.wait_for_programs()


class ExecutorStats(CoreCall[dict[str, Any]]):
    """Counters of the executor: steps, padding, buckets, programs, recompiles."""

    only_tells = True

    def answer(self, core: "EngineCore") -> dict[str, Any]:
        return core.executor.workers.stats()

    def merged(self, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return merged_executor_stats(answers)


class StepRecords(CoreCall[tuple[list[StepRecord], int]]):
    """The newest finished steps, oldest first, and how many before them are forgotten."""

    only_tells = True

    def answer(self, core: "EngineCore") -> tuple[list[StepRecord], int]:
        return core.step_log.read()

    def merged(self, answers: Sequence[tuple[list[StepRecord], int]]) -> tuple[list[StepRecord], int]:
        return merged_steps(answers)


class BlockMap(CoreCall[KVBlockMap]):
    """Who holds which KV block now."""

    only_tells = True

    def answer(self, core: "EngineCore") -> KVBlockMap:
        return core.block_map()

    def merged(self, answers: Sequence[KVBlockMap]) -> KVBlockMap:
        return merged_block_maps(answers)


class Snapshot(CoreCall[EngineSnapshot]):
    """What the engine does now, with the steps after the first `since_step`. See `snapshot.py` for its bounds.

    The steps of several cores are counted together, so each of them tells its newest ones, however many are known.
    """

    only_tells = True

    since_step: int = 0

    def for_core(self, number: int) -> Self:
        return type(self)()

    def answer(self, core: "EngineCore") -> EngineSnapshot:
        return core.snapshot(self.since_step)

    def merged(self, answers: Sequence[EngineSnapshot]) -> EngineSnapshot:
        return merged_snapshots(answers)


class SavePrefix(CoreCall[PrefixInfo]):
    """Write what the prefix cache has of a text's beginning to a file. UsageError where that is not all of it."""

    path: str
    token_ids: Sequence[int]
    cache_salt: str | None = None

    def answer(self, core: "EngineCore") -> PrefixInfo:
        return core.save_prefix(Path(self.path), self.token_ids, self.cache_salt)


class LoadPrefix(CoreCall[PrefixInfo]):
    """Put the pages of such a file into the tiers. UsageError, and PageError for one that must not be used."""

    path: str

    def answer(self, core: "EngineCore") -> PrefixInfo:
        return core.load_prefix(Path(self.path))


class KeepLease(CoreCall[None]):
    """A request may come with these `kv_transfer_params`; not `is_needed`: it will not come after all. All of several
    cores are told, of which one would have it. RequestError for params that cannot be."""

    params: Mapping[str, Any] = {}
    is_needed: bool = True

    def answer(self, core: "EngineCore") -> None:
        source_of(transfer_params({PARAMS: self.params}))
        if core.transfers is not None:
            core.transfers.connector.expect_request(self.params, self.is_needed)


class CollectiveRpc(CoreCall[list[Any]]):
    """Call a method of every worker, or a function with it; a result of each. It holds a function, so it is not sent
    to another process. UsageError for an unknown name."""

    method: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}

    def answer(self, core: "EngineCore") -> list[Any]:
        try:
            return core.executor.collective_rpc(self.method, self.args, self.kwargs)
        finally:
            core.heed_weights()


def folder_of_core(folder: str, number: int) -> str:
    """Where one of several cores writes what all of them are to write to `folder`."""
    return str(Path(folder) / f"core{number}")


CALLS: dict[str, type[CoreCall[Any]]] = {
    call.name(): call
    for call in (
        BlockMap,
        ExecutorStats,
        IsSleeping,
        KeepLease,
        ResetPrefixCache,
        Sleep,
        Snapshot,
        StartProfile,
        StepRecords,
        StopProfile,
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
