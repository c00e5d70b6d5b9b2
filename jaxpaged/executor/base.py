"""The protocol between the engine core and whatever computes a step.

Three things implement it: `UniProcExecutor`, `MultiProcExecutor`, and the fakes of the tests. The engine core sees
nothing else of devices: it imports no jax.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpaged.kv_cache_spec import EncoderCacheConfig, KVCacheConfig
from jaxpaged.kv_connector.base import KVCacheLayout, KVConnector, KVConnectorMetadata, KVConnectorOutput
from jaxpaged.kv_store.prefix_file import PlacedPage, PrefixInfo
from jaxpaged.messages import LoRAInfo, LoRARequest, ModelRunnerOutput, SchedulerOutput
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
    encoder_cache_config: EncoderCacheConfig | None  # None: text only

    @property
    def weights_version(self) -> str:
        """Names the weights as they are now: others have another name, in this engine or the next."""
        ...

    @property
    def weights_label(self) -> str | None:
        """What the weights are called that an update brought; None for those that the engine loaded."""
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
    """What carries keys and values between the devices and a connector. Steps bring it what to do, and their results
    say what has become of it; this is for what is said without a step."""

    connector: KVConnector
    layout: KVCacheLayout

    def exchange(self, metadata: KVConnectorMetadata | None, seconds: float) -> KVConnectorOutput:
        """Do what `metadata` says, and wait at most so many seconds for a load or a save to end. Returns what has
        become of them."""
        ...

    def save_prefix(
        self, path: Path, token_ids: Sequence[int], pieces: Sequence[tuple[Sequence[PlacedPage], Sequence[int]]]
    ) -> PrefixInfo:
        """Write keys and values to a file: pieces, each its pages and the ids of its blocks. Raises UsageError."""
        ...

    def load_prefix(self, path: Path) -> PrefixInfo:
        """Bring a file's pages to where they are kept. Raises UsageError, and PageError for one that must not be
        used."""
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

    def read_lora(self, request: LoRARequest) -> LoRAInfo:
        """Read an adapter's files into host memory, under the number that `lora_int_id` is; steps name it so. From any
        thread, beside steps. Raises CheckpointError."""
        ...

    def drop_lora(self, lora_int_id: int) -> Any:
        """Take an adapter out of host memory. What is in a slot stays there."""
        ...

    def start_weight_update(self, is_partial: bool) -> None:
        """Begin to take other weights; an update that was begun before is forgotten. UsageError, ConflictError."""
        ...

    def receive_weights(self, weights: Any, mapping: str | None) -> int:
        """Check a part of them: files and offers, or arrays by the checkpoint's names, or with `mapping` a framework's
        tree or where one is; bytes of all parts so far. Raises CheckpointError, ServerError, ConflictError, UsageError,
        and nothing of it is kept here."""
        ...

    def take_weights_back(self) -> int:
        """Forget the part that was received last, where it was not refused; bytes of the others."""
        ...

    def abandon_weight_update(self) -> None:
        """Forget what has come of an update, if one was begun."""
        ...

    def check_weight_update(self) -> None:
        """Raise CheckpointError unless all is there that is to be replaced; ConflictError."""
        ...

    def make_room_for_update(self) -> None:
        """Have room for the largest of them, beside all that is there; nothing is in flight. Raises CapacityError, and
        nothing was replaced."""
        ...

    def finish_weight_update(self, label: str) -> None:
        """Compute with them from now on; nothing is in flight. Raises CapacityError: then there are none, as if they
        slept."""
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
