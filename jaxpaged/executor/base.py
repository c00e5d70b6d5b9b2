"""The protocol between the engine core and whatever computes a step.

Three things implement it: `UniProcExecutor`, `MultiProcExecutor`, and the fakes of the tests. The engine core sees
nothing else of devices: it imports no jax.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxpaged.kv_cache_spec import KVCacheConfig
from jaxpaged.kv_store.page import PageKey
from jaxpaged.kv_store.pieces import Piece
from jaxpaged.kv_store.tier import ChunkTiers, Lookup
from jaxpaged.kv_store.tier_events import TierEvent
from jaxpaged.kv_store.transfer_params import RemoteSource
from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput
from jaxpaged.sampling_params.features import Extra


class PendingOutput(Protocol):
    """A step that was dispatched."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return what it produced. Raises EngineError when the step failed."""
        ...

    def drafts(self) -> list[list[int]]:
        """Wait for what was drafted in a `masked` step, for each request that may get more than one token. Raises
        EngineError when the devices could not compute it."""
        ...


class Executor(Protocol):
    """Computes steps in the order in which they are given."""

    kv_cache_config: KVCacheConfig

    @property
    def weights_version(self) -> str:
        """Names the weights as they are now: others have another name, in this engine or the next."""
        ...

    @property
    def token_buckets(self) -> Sequence[int]:
        """Numbers of tokens to which steps are padded, sorted."""
        ...

    @property
    def workers(self) -> "Workers":
        """What holds weights, KV cache and programs."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Dispatch one step and return at once, however many earlier ones are pending. A `masked` step stops before it
        samples: its result comes from `sample_tokens`."""
        ...

    def sample_tokens(self, masks_NW: np.ndarray) -> PendingOutput:
        """Dispatch the rest of the step that was executed last, which is `masked`; nothing may be dispatched between.

        `masks_NW` are bits of the tokens that may be drawn, uint32: a line for each token that each request may get.
        """
        ...

    def max_step_tokens(self) -> int:
        """Tokens that a step should have at most, so that it waits for no program while there are smaller ones."""
        ...

    def max_decode_steps(self) -> int:
        """Decode steps that one program may run now for the requests that have a row; 1 until it is compiled.

        Who asks wants it compiled, so ask only where it is of use.
        """
        ...

    def can_run(self, extra: Extra) -> bool:
        """Whether steps with requests that need `extra` can run without waiting for a program to be compiled: only then
        may there be any.

        Who asks wants it compiled. Raises EngineError when it cannot be.
        """
        ...

    def recover(self) -> None:
        """Make the device usable again after a failed step. All cached keys and values are lost."""
        ...

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        """Call a method of every worker, or a function with it; a result of each. Raises UsageError for no method."""
        ...

    def shutdown(self) -> None:
        """Release threads and device memory."""
        ...


class KVTransferWorker(Protocol):
    """What carries keys and values between the devices and tiers of pages. A load of the core's has `pages`."""

    def lookup(self, keys: Sequence[PageKey]) -> list[Lookup]:
        """Whether pages are in a tier, at once."""
        ...

    def where(self, keys: Sequence[PageKey]) -> list[str]:
        """The names of the tiers that pages would come from, at once."""
        ...

    chunk_tiers: ChunkTiers
    """What is told of texts, where a tier needs it."""

    def expect(self, keys: Sequence[PageKey], source: RemoteSource) -> None:
        """Another engine lends these pages."""
        ...

    def keep_lease(self, source: RemoteSource) -> None:
        """A request waits for what another engine lends: it is to be lent until `release`."""
        ...

    def release(self, source: RemoteSource) -> None:
        """What it lends is not needed any more."""
        ...

    page_tokens: int
    """Of a page."""

    def lend(self, num_tokens: int, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """Lend pages of a prompt, which are saved next. What an answer says of it."""
        ...

    @property
    def outlives_engine(self) -> bool:
        """Whether a tier keeps pages when this engine has ended."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether another copy off the devices may begin now."""
        ...

    def wait_for_room(self, seconds: float) -> bool:
        """Sleep until a copy ends that is under way, at most so long. Whether another one may begin."""
        ...

    def save[S: tuple[int, Piece]](self, saves: Sequence[S]) -> list[S]:
        """Dispatch copies of pieces off the devices, each behind the step that computes it. Those for which there is no
        room now."""
        ...

    def give_up(self, saves: Sequence[tuple[int, Piece]]) -> None:
        """These will not be saved: their content is lost next."""
        ...

    def confirm(self, before: int | None) -> None:
        """The steps before number `before` are done, None: all are; what they computed may be kept."""
        ...

    def revoke(self) -> None:
        """What is not confirmed is never kept."""
        ...

    def discard(self, keys: Sequence[PageKey]) -> None:
        """Keep these pages no longer: what computed them failed."""
        ...

    def load(self, load: Any) -> None:
        """Begin to fetch pages."""
        ...

    def take_fetched(self) -> Sequence[Any]:
        """What became of loads since the last call: each has the `load`, `came` and `sources` (the
        tier's name) for each page, and `seconds`."""
        ...

    def wait(self, seconds: float) -> None:
        """Sleep until there is something to take, at most so long."""
        ...

    def take_changes(self) -> list[TierEvent]:
        """What came into the tiers and left them since the last call; of the first call, all that is there."""
        ...

    def take_copied(self) -> tuple[int, int]:
        """Blocks whose copies off the devices, and to them, were dispatched since the last call."""
        ...

    def write(self, fetched: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Dispatch copies of what came into the blocks of each piece, 0 for none."""
        ...


class Workers(Protocol):
    """All workers as one: what is asked of it, each of them does."""

    def sleep(self, discard: bool) -> None:
        """Free what KV cache and weights take on the devices. Nothing is dispatched before both are back.

        `discard`: the host keeps no copy of the weights either. What sleeps already stays as it is.
        """
        ...

    def wake_up(self, part: str) -> None:
        """Take "weights" or "kv_cache" back; cached keys and values are lost. Raises CheckpointError, CapacityError."""
        ...

    def start_profile(self, folder: str | None) -> None:
        """Record what the devices do; None: where the options say. Raises UsageError."""
        ...

    def stop_profile(self) -> None:
        """Write what was recorded. Raises ConflictError when nothing is."""
        ...

    def wait_for_programs(self) -> None:
        """Block until every program is compiled: for tests and measurements; serving does not need it."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters since the start: steps, padding, programs, compile time, recompiles."""
        ...
