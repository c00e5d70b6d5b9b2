"""Parameters that can leave the devices and come back: from copies on the host, or from where they were read first,
and the name by which the prefix cache knows them.

On a CPU the device's memory is the host's, so a copy would free nothing: there, parameters are read again, and files
that were read lately are in the system's cache. This module does not know what a step is.
"""

import contextlib
import ctypes
import logging
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpaged.messages import Progress
from jaxpaged.models.config import DecoderConfig
from jaxpaged.models.drafted import DraftedParams
from jaxpaged.models.joined import joined_params
from jaxpaged.params.checkpoint import DummyParams, check_folder, checkpoint_version, content_version, load_params
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.step.expert_moves import loaded_with_tables

logger = logging.getLogger(__name__)


class Weights:
    """`load` makes the parameters, any number of times, and compiles nothing but the first time.

    `identify` names what `load` would make. `keeps_copies`: parameters that leave the devices are kept on the host,
    unless they are to be discarded. So are those of an update, which no file has, on a CPU too.

    `label`: what the update is called that they come from, None for those that were loaded. `is_lent`: some arrays are
    somebody else's too, and are never deleted here.
    """

    def __init__(self, load: Callable[[], Any], identify: Callable[[], str], keeps_copies: bool):
        self._load, self._identify = load, identify
        self._keeps_copies = keeps_copies
        self._copies: Any = None
        self.version = ""
        self.label: str | None = None
        self.is_lent = False

    def put_aside(self, params: Any, discard: bool) -> None:
        """Free the memory of `params`, whose arrays are deleted. None: they left before."""
        if discard:
            self._copies = None
        elif (self._keeps_copies or self.label is not None) and params is not None:
            self._copies = jax.tree.map(HostCopy, params)
        self.release(params)
        self.is_lent = False

    def release(self, tree: Any) -> None:
        """Free the memory of parameters, unless they may be somebody else's: those stay as long as he has them."""
        if not self.is_lent:
            free(tree)

    def bring_back(self) -> Any:
        """The parameters on their devices. Raises what loading raises; then they can still be brought back later."""
        if self._copies is None:
            if self.label is not None:
                logger.warning("the weights of update %r are gone; the checkpoint's take their place", self.label)
            self.version, self.label = self._identify(), None
            return self._load()
        params = jax.tree.map(HostCopy.to_devices, self._copies)
        self._copies = None
        return params

    def rename(self, label: str = "") -> None:
        """The parameters are others than those that were loaded. `label`: what somebody calls them; what was computed
        with them is known by a name that nobody else gives, since he may call others the same."""
        self.version = secrets.token_hex(16)
        self.label = label or self.version


class WeightsSeen:
    """Which arrays parameters were at one moment, without keeping them alive. Arrays never change."""

    def __init__(self, params: Any):
        self._arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]

    def are(self, params: Any) -> bool:
        """Whether `params` are the same arrays."""
        leaves = jax.tree.leaves(params)
        return len(leaves) == len(self._arrays) and all(ref() is leaf for ref, leaf in zip(self._arrays, leaves))


class HostCopy:
    """One sharded array in host memory: what devices hold alike is kept once."""

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        self._parts = {}
        for shard in array.addressable_shards:
            if str(shard.index) not in self._parts:
                self._parts[str(shard.index)] = np.array(shard.data)  # never a view of the device's memory

    def to_devices(self) -> jax.Array:
        """The array again, with the same sharding."""
        parts = lambda index: self._parts[str(index)]
        return jax.make_array_from_callback(self._shape, self._sharding, parts).block_until_ready()


def free(tree: Any) -> None:
    """Delete all arrays of a pytree now, whoever still refers to them. Those that were deleted before pass."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def return_freed_pages() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc); it keeps it otherwise."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


# ---- where they come from ------------------------------------------------------------------------


def weights_of(stages: Sequence[EngineSpec], folder: Path | None, progress: Progress) -> Weights:
    """The weights of the model in `folder`, and of a model that drafts, of every stage."""
    last = stages[-1]
    folders = [each for each in (folder, last.draft and last.draft.folder) if each is not None]
    is_shared = last.config.cache.offload is not None or last.ec_transfer is not None
    identify = partial(versions, folders, is_shared) if last.config.load.load_format != "dummy" else str
    return Weights(
        loader_of(stages, folder, progress), identify, keeps_copies=last.mesh.devices.flat[0].platform != "cpu"
    )


def versions(folders: list[Path], is_shared: bool) -> str:
    """A name of all weights in these folders. `is_shared`: what is computed with them may be found by engines that have
    copies of these files elsewhere."""
    if not is_shared:
        return "+".join(map(checkpoint_version, folders))
    began = time.monotonic()
    name = "+".join(map(content_version, folders))
    logger.info("named the weights by their content in %.1f s: what is computed is shared", time.monotonic() - began)
    return name


def loader_of(stages: Sequence[EngineSpec], folder: Path | None, progress: Progress) -> Callable[[], Any]:
    """What makes the parameters, again and again the same ones unless the checkpoint is another by then."""
    spec = stages[-1]
    if len(stages) > 1:
        return stage_loader(stages, folder, progress)
    load = part_loader(spec, spec.specs, spec.decoder, folder, progress, is_whole=spec.loads_all)
    if spec.config.parallel.expert_balance is not None:
        load = partial(loaded_with_tables, load, spec.mesh)
    if spec.draft is None:
        return load
    place, config = spec.draft.folder, spec.draft.config
    load_draft = part_loader(spec, spec.draft_specs, config, place, progress, is_whole=place != folder)
    return lambda: DraftedParams(load(), load_draft())


def stage_loader(stages: Sequence[EngineSpec], folder: Path | None, progress: Progress) -> Callable[[], Any]:
    """The same for stages: a tuple of what each has. Files are checked as a whole first."""
    first = stages[0]
    loads = [part_loader(stage, stage.specs, stage.whole, folder, progress, is_whole=False) for stage in stages]

    def load() -> tuple[Any, ...]:
        if first.config.load.load_format != "dummy":
            assert folder is not None, "weights that are loaded have a folder"
            check_folder(first.whole_specs, first.whole, folder)
        return tuple(each() for each in loads)

    return load


def part_loader(
    spec: EngineSpec, specs: Any, decoder: DecoderConfig, folder: Path | None, progress: Progress, is_whole: bool = True
) -> Callable[[], Any]:
    """The same for one model, or for a part of it, with weights joined where programs want them so."""
    load = stored_loader(spec, specs, decoder, folder, progress, is_whole)
    return partial(joined_params, load) if spec.joins_weights else load


def stored_loader(
    spec: EngineSpec, specs: Any, decoder: DecoderConfig, folder: Path | None, progress: Progress, is_whole: bool
) -> Callable[[], Any]:
    """The same with weights as checkpoints have them."""
    target, load = (spec.mesh, spec.dtype), spec.config.load
    if load.load_format == "dummy":
        whole = None if spec.stage is None else spec.whole_specs
        return DummyParams(specs, decoder, *target, seed=spec.config.model.seed, whole=whole).make
    report = partial(progress, "weights")
    return partial(load_params, specs, decoder, folder, *target, report, load.load_format, is_whole)
