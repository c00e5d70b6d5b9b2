"""One process, one worker: the executor that runs a step where it is asked for.

The engine asks here what kind of devices this process has, too, since it imports no jax itself.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.config import EngineConfig
from jaxpaged.distributed.backend import start_backend
from jaxpaged.errors import UsageError
from jaxpaged.executor.base import KVTransferWorker, PendingOutput
from jaxpaged.kv_cache_spec import EncoderCacheConfig
from jaxpaged.messages import Progress, SchedulerOutput
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.interface import Model
from jaxpaged.multimodal.embeds_folder import EmbedsFolder
from jaxpaged.worker.extension import worker_class
from jaxpaged.worker.programs.choose import ProgramChoice, Readiness, sizes_of
from jaxpaged.worker.weights import WeightsSeen
from jaxpaged.worker.worker import Worker

SettleBlocks = Callable[[int], int]
"""Of the KV blocks that fit here, how many there are."""


def itself[T](value: T) -> T:
    """What one process agrees on with itself."""
    return value


def platform(gpu_memory_utilization: float) -> str:
    """ "cpu", "gpu" or "tpu": where programs run unless they are told otherwise.

    The first call starts the devices, of GPUs with so much of their memory. Raises ConfigError when they do not start.
    """
    return start_backend(gpu_memory_utilization)[0].platform


class UniProcExecutor:
    """An `Executor` that dispatches in this process: over all its devices, or over those of a group that it is in."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        decoder: DecoderConfig,
        folder: Path | None,
        progress: Progress | None = None,
        settle_blocks: SettleBlocks = itself,
        readiness: Callable[[Readiness], Readiness] = itself,
    ):
        """What several processes agree on: `settle_blocks`, how many KV blocks there are if so many fit here;
        `readiness`, which programs are ready, from what is ready here."""
        make_worker = worker_class(config.plugins.worker_extension_cls)
        self.worker = make_worker(config, model, decoder, folder, progress, settle_blocks)
        self.kv_cache_config = self.worker.kv_cache_config
        encoder = self.worker.engine_spec.encoder
        self.encoder_cache_config: EncoderCacheConfig | None = encoder and encoder.cache
        sizes = sizes_of(self.worker.step_programs, self.worker.programs.builders)
        self.choice = ProgramChoice(readiness(self.worker.programs), sizes)
        self.max_step_tokens, self.max_decode_steps = self.choice.max_step_tokens, self.choice.max_decode_steps
        self.can_run = self.choice.can_run

    @property
    def workers(self) -> Worker:
        """The only one."""
        return self.worker

    @property
    def kv_transfer(self) -> KVTransferWorker | None:
        """What keeps keys and values besides the devices, if the options ask for it."""
        return self.worker.kv_transfer

    @property
    def embeds_folder(self) -> EmbedsFolder | None:
        """Where engines share embeddings of pictures, if the options ask for it."""
        return self.worker.embeds_folder

    def embeds_space(self) -> str:
        """Names all that embeddings depend on besides the picture, as the weights are now."""
        return self.worker.embeds_space()

    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        scheduler_output.programs = self.choice.choose(scheduler_output)
        metadata, transfer = scheduler_output.kv_connector_metadata, self.worker.kv_transfer
        if metadata is None or transfer is None:
            return self.worker.runner.execute_model(scheduler_output)
        transfer.start_load_kv(metadata)
        pending = self.worker.runner.execute_model(scheduler_output)
        transfer.wait_for_save(metadata)
        return pending._replace(readings=(*pending.readings, transfer))

    def sample_tokens(self, masks_NW: np.ndarray) -> PendingOutput:
        return self.worker.runner.sample_tokens(masks_NW)

    @property
    def token_buckets(self) -> Sequence[int]:
        return self.worker.engine_spec.token_buckets

    @property
    def weights_version(self) -> str:
        return self.worker.weights.version

    @property
    def weights_label(self) -> str | None:
        return self.worker.weights.label

    def recover(self) -> None:
        self.choice.forget_requests()
        self.worker.recover()

    def collective_rpc(self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list:
        """Call a method of the worker, or a function with it; a list of one result. Raises UsageError for no method."""
        if not isinstance(method, str):
            found = partial(method, self.worker)
        elif method.startswith("_") or not callable(found := getattr(self.worker, method, None)):
            raise UsageError(f"the worker has no method {method!r}. Give a function that takes the worker instead.")
        before, version = WeightsSeen(self.worker.device.params), self.weights_version
        try:
            return [found(*args, **kwargs)]
        finally:
            if self.weights_version == version and not before.are(self.worker.device.params):
                self.worker.weights.rename()

    def shutdown(self) -> None:
        self.worker.shutdown()
