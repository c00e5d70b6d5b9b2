"""Adapters on their way: from files into host memory, and from there into the slots that the engine's core names.

The core decides what is kept and which slot has what. Here is a plain table of what was read, ready to travel, and of
what is in slots, so that it can come back to devices that forgot it. This module reads nothing back; `Probe` compares
what an adapter makes of a few tokens with what the model makes of them without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpaged.errors import CheckpointError, ConflictError
from jaxpaged.layers.experts import placements_of
from jaxpaged.layers.lora import plain_lines
from jaxpaged.messages import LoRAInfo, LoRARequest, ModelRunnerOutput, ProgramKey
from jaxpaged.params.adapters.adapter import Adapter
from jaxpaged.params.adapters.base import BaseWeights
from jaxpaged.params.adapters.reading import read_adapter
from jaxpaged.params.adapters.scores import with_whole_scores
from jaxpaged.params.hub import resolve_adapter_folder
from jaxpaged.worker.device import Device
from jaxpaged.worker.engine_spec import EngineSpec
from jaxpaged.worker.expert_balancer import ExpertBalancer
from jaxpaged.worker.lora_stacks import LoraSpec
from jaxpaged.worker.programs.declare import LORA_KINDS, ProgramKind
from jaxpaged.worker.step.packed import StepLayout

FOLLOWING = "magnitudes (DoRA) or factors of a classifier"
NUM_PROBED = 4
"""Tokens of a probe."""


Version = tuple[int, str]
"""The number of an adapter, and the digest of its files."""


def version_of(info: LoRAInfo) -> Version:
    return info.lora_int_id, info.digest


class HostAdapter(NamedTuple):
    """An adapter in host memory: what travels, of each stage, and the level of programs that it needs."""

    info: LoRAInfo
    lines: tuple[tuple[Mapping[int, np.ndarray], ...], ...]
    level: int
    changes_layers: bool
    follows: bool  # it has parts that follow from the weights of the checkpoint


class Probe:
    """What the layers made of a few tokens with an adapter and without it, arrays on their way to the host."""

    def __init__(self, info: LoRAInfo, with_it: Any, without: Any):
        self.info, self._arrays, self._differ = info, (with_it, without), False

    def complaint(self) -> str | None:
        """Why the adapter must not be used; None: it changes what the model computes."""
        if self._arrays:
            with_it, without = (np.asarray(plain_lines(each)) for each in self._arrays)
            self._arrays, self._differ = (), not np.array_equal(with_it, without)
        if self._differ:
            return None
        return (
            f"the adapter {self.info.lora_name!r} changes nothing: with it and without it the model computes the "
            f"same of {NUM_PROBED} tokens. Its weights are zeros, or it was made for another model."
        )


@dataclass
class ProbeReading:
    """Fails requests of an adapter that changes nothing. It comes before what reads their tokens."""

    slots: "AdapterSlots"
    probe: Probe
    request_ids: Sequence[str]

    def read(self, output: ModelRunnerOutput) -> None:
        complaint = self.probe.complaint()
        if complaint is None:
            self.slots.passed(self.probe)
            return
        for request_id in self.request_ids:
            output.failed.setdefault(request_id, complaint)


class AdapterSlots:
    """`specs`: the stacks of every stage. `read`: what reads an adapter's files. `balancer`: what moves experts, which
    what is in slots follows."""

    def __init__(
        self,
        specs: Sequence[LoraSpec],
        read: Callable[[LoRARequest], Adapter],
        balancer: ExpertBalancer | None = None,
    ):
        self._specs, self._read, self._experts_move = specs, read, balancer is not None
        if balancer is not None:
            balancer.after_move = self.follow_experts
        self._host: dict[int, HostAdapter] = {}
        self._in_slots: dict[int, HostAdapter] = {}
        self._levels = np.zeros(specs[-1].max_loras + 1, np.int32)  # by slot
        self.probes: dict[Version, Probe] = {}  # of adapters that have not passed
        self._probed: set[Version] = set()

    # ---- host memory -----------------------------------------------------------------------------

    def read(self, request: LoRARequest, update: str | None = None) -> LoRAInfo:
        """Read an adapter into host memory, in place of one of this number. May run beside steps. `update`: what
        brought the weights that compute now, None for the checkpoint's. Raises CheckpointError."""
        adapter, last = self._read(request), self._specs[-1]
        check_targets(self._specs, adapter, request.lora_path)
        grows = any(each.magnitude is not None for each in adapter.weights.values())
        follows = grows or adapter.has_merged
        if follows and update is not None:
            raise CheckpointError(
                f"{request.lora_path}: the adapter has {FOLLOWING}, which follow from the checkpoint's weights, but "
                f"those of update {update!r} compute. Train it without these, or merge it."
            )
        info = LoRAInfo(
            lora_name=request.lora_name,
            lora_int_id=request.lora_int_id,
            lora_path=request.lora_path,
            digest=adapter.digest,
            rank=adapter.rank,
            num_tensors=adapter.num_tensors,
            num_bytes=adapter.num_bytes,
            changes_tower=any(spec.changes_tower(adapter.weights) for spec in self._specs),
        )
        lines = tuple(spec.pack(adapter.weights, adapter.replaced) for spec in self._specs)
        changes_layers = any(spec.changes_layers(adapter.weights) for spec in self._specs)
        level = last.level_of(adapter.rank, grows)
        self._host[request.lora_int_id] = HostAdapter(info, lines, level, changes_layers, follows)
        return info

    def check_changeable(self) -> None:
        """Raise ConflictError where an adapter follows from the weights that compute now."""
        for adapter in (*self._host.values(), *self._in_slots.values()):
            if adapter.follows:
                raise ConflictError(
                    f"the adapter {adapter.info.lora_name!r} has {FOLLOWING}, which follow from the weights that "
                    "compute now. Remove it, and change the weights then."
                )

    def drop(self, lora_int_id: int) -> bool:
        """Forget an adapter on the host; whether there was one. What is in a slot stays there."""
        return self._host.pop(lora_int_id, None) is not None

    # ---- slots -----------------------------------------------------------------------------------

    def load(self, device: Device, slot: int, lora_int_id: int) -> bool:
        """Dispatch an adapter's move into a slot; whether it is to be probed, which follows from what was dispatched
        and not from what was read back: all processes of an engine say the same."""
        adapter = self._host[lora_int_id]
        self._in_slots[slot], self._levels[slot] = adapter, adapter.level
        self._put(device, slot, adapter)
        return adapter.changes_layers and version_of(adapter.info) not in self._probed

    def _put(self, device: Device, slot: int, adapter: HostAdapter) -> None:
        uploads = tuple(map(uploads_of, self._specs, adapter.lines))
        place = np.asarray(slot, np.int32)
        given = uploads if len(self._specs) > 1 else uploads[0]
        places = [placements_of(device.base_params)] if self._experts_move else []
        device.stacks = device.call(ProgramKey(ProgramKind.LOAD_LORA), device.stacks, given, place, *places)

    def begin_anew(self, device: Device) -> None:
        """Stacks of zeros, and in them what was in slots."""
        self._probed -= self.probes.keys()  # whose arrays may be lost
        self.probes.clear()
        device.stacks = device.call(ProgramKey(ProgramKind.LORA_ZEROS))
        self.follow_experts(device)

    def follow_experts(self, device: Device) -> None:
        """Put what is in slots where experts are now."""
        for slot, adapter in self._in_slots.items():
            self._put(device, slot, adapter)

    # ---- probes ----------------------------------------------------------------------------------

    def note_probe(self, slot: int, with_it: Any, without: Any) -> None:
        """What the layers make with the adapter in a slot, and without it."""
        info = self._in_slots[slot].info
        self.probes[version_of(info)] = Probe(info, with_it, without)
        self._probed.add(version_of(info))

    def probe_of(self, slot: int) -> Probe | None:
        """That of the adapter in a slot, until it has passed."""
        return self.probes.get(version_of(self._in_slots[slot].info))

    def passed(self, probe: Probe) -> None:
        """An adapter changes what the model computes."""
        if self.probes.get(version_of(probe.info)) is probe:
            del self.probes[version_of(probe.info)]

    # ---- steps -----------------------------------------------------------------------------------

    def program(self, device: Device, key: ProgramKey, slots_of_ranks: Sequence[np.ndarray]) -> ProgramKey:
        """The program that takes no more of the stacks than rows with these slots need, if it is compiled."""
        level = max([int(self._levels[slots_R].max(initial=0)) for slots_R in slots_of_ranks])
        if level == self._specs[-1].num_levels or key.kind not in LORA_KINDS:
            return key
        lighter = ProgramKey(LORA_KINDS[ProgramKind(key.kind)][level], key.size)
        programs = device.programs
        return lighter if lighter in programs.builders and programs.is_ready(lighter) else key


def reader_of(
    spec: EngineSpec, folder: Path | None, download_dir: str | None = None
) -> Callable[[LoRARequest], Adapter]:
    """What reads adapters of the model in a folder; None: there are no files of its weights. Those of the hub come to
    `download_dir`."""
    lora = spec.lora
    assert lora is not None, "the engine takes adapters"
    base_weight = None if folder is None else BaseWeights(folder, spec.whole_specs, spec.whole)

    def read(request: LoRARequest) -> Adapter:
        adapter = read_adapter(
            resolve_adapter_folder(request.lora_path, download_dir=download_dir),
            spec.whole_specs,
            spec.whole,
            dtype=lora.dtype,
            max_rank=lora.max_rank,
            base_weight=base_weight,
        )
        return with_whole_scores(adapter, spec.whole_specs, base_weight)

    return read


def check_targets(specs: Sequence[LoraSpec], adapter: Adapter, path: str) -> None:
    """CheckpointError for an adapter that changes what has no stacks."""
    has_stacks = frozenset().union(*(spec.paths.union(spec.scores) for spec in specs))
    others = sorted({*adapter.weights, *adapter.replaced} - has_stacks)
    if vector := next((each for each in others if each in adapter.weights and adapter.weights[each].b.ndim == 1), None):
        raise CheckpointError(
            f"{path}: the adapter changes {vector.removeprefix('.')}, which makes one number of a token, and engines "
            "keep adapters of matrices. Train it without that module, or merge it with the model (jaxpaged merge)."
        )
    if others:
        raise CheckpointError(
            f"{path}: the adapter changes {len(others)} matrices of which the engine keeps no adapters, the first of "
            f"them {others[0].removeprefix('.')}. Where lora_target_modules leaves a module out, name it there; tables "
            "have adapters where they are named, as in --lora-target-modules all-linear embed_tokens lm_head, and what "
            "encodes pictures with --enable-tower-connector-lora."
        )


def uploads_of(spec: LoraSpec, lines: tuple[Mapping[int, np.ndarray], ...]) -> tuple[Any, ...]:
    """What travels to the devices of a stage."""
    if spec.mesh.size == 1:
        return tuple(of_type[0][None] for of_type in lines)
    return tuple(map(uploaded, spec.upload, lines))


def uploaded(shape: jax.ShapeDtypeStruct, lines: Mapping[int, np.ndarray]) -> jax.Array:
    """An array on its devices, each of which gets its line."""
    own_line = lambda index: lines[index[0].indices(shape.shape[0])[0]][None]
    return jax.make_array_from_callback(shape.shape, shape.sharding, own_line)


def probe_step(layout: StepLayout, null_row: int, num_ranks: int, slot: int) -> np.ndarray:
    """The packed array of a step of a few tokens of nobody, with the adapter of a slot."""
    packed, count = np.zeros(layout.size, np.int32), min(NUM_PROBED, layout.num_tokens)
    parts = layout.split(packed)
    parts.num_seqs[0], parts.seq_lens_R[0], parts.sample_idxs_R[0] = 1, count, count - 1
    parts.rows_R[:] = parts.table_place_U[:] = null_row
    parts.query_start_loc_R1[1:] = count
    parts.token_ids_T[:count] = np.arange(1, count + 1)
    parts.lora_slots_R[0] = slot
    return np.tile(packed, num_ranks)
