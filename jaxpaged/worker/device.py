"""What a step is computed with: compiled programs, parameters, and the state that stays on the devices between steps.

Paranoid file. Every program donates the state that it changes and returns it anew, so whoever calls one keeps what it
returns; only programs from the table are ever called. This module does not know what they compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpaged.messages import ProgramKey
from jaxpaged.models.seeing import tower_of, without_tower
from jaxpaged.worker.programs.compiled import CompiledPrograms
from jaxpaged.worker.programs.declare import BASE_KINDS, DRAW_KINDS, ProgramKind
from jaxpaged.worker.step.adapters import AdaptedParams


@dataclass
class DeviceState:
    """Everything on the devices that a step changes. Whatever is read from here is gone once a program donated it."""

    kv: Any
    tables: Any
    rows: Any  # `RowTokens`
    row_state: Any  # what the output stage keeps of rows: sampling state, or sums of prompts
    hidden: Any  # of every token of the last step of single tokens, see `step/functions.py`
    encoded: Any = None  # the encoder cache, of an engine that sees


@dataclass
class StepCounts:
    """What was computed so far, for `stats`."""

    steps: int = 0
    scheduled_tokens: int = 0
    padded_tokens: int = 0
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, scheduled: int, bucket: int, ranks: int = 1) -> None:
        """A step of so many tokens, in which each rank has `bucket` places."""
        self.steps += 1
        self.scheduled_tokens += scheduled
        self.padded_tokens += ranks * bucket - scheduled
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1


@dataclass
class Device:
    """`params`, `head` and `state` are None while they sleep. `table_CV`: of an engine that sees, what the values of
    pixels become. `stacks`: of one with adapters; `head_stacks`: which of them are those of the head, and
    `tower_stacks` of the tower, by its own paths."""

    programs: CompiledPrograms
    params: Any
    head: Any
    state: DeviceState | None
    counts: StepCounts = field(default_factory=StepCounts)
    table_CV: Any = None
    stacks: Any = None
    head_stacks: tuple[str, ...] = ()
    tower_stacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_params(self) -> Any:
        """The parameters of programs of tokens: all but the tower's, and the stacks of adapters."""
        return self.base_params if self.stacks is None else with_stacks(self.base_params, self.stacks)

    @property
    def tower_params(self) -> Any:
        """Those of the tower, with its own stacks where adapters adapt it."""
        tower = tower_of(self.params)
        if not self.tower_stacks:
            return tower
        return AdaptedParams(tower, {own: self.stacks[path] for own, path in self.tower_stacks.items()})

    @property
    def base_params(self) -> Any:
        """The same without stacks."""
        return self.params if self.table_CV is None else without_tower(self.params)

    def params_for(self, key: ProgramKey) -> Any:
        """The parameters of a program of tokens: steps without adapters do without the stacks."""
        return self.base_params if key.kind in BASE_KINDS else self.token_params

    def head_for(self, key: ProgramKey) -> Any:
        """The same of the head."""
        if not self.head_stacks or key.kind in BASE_KINDS:
            return self.head
        last = self.stacks[-1] if isinstance(self.stacks, tuple) else self.stacks
        return AdaptedParams(self.head, {path: last[path] for path in self.head_stacks})

    def drawing(self, key: ProgramKey, program: ProgramKey) -> ProgramKey:
        """The program that draws the tokens of a step: without the head's stacks, if `program` computed its layers
        without, and it is compiled."""
        if not self.head_stacks or program.kind not in BASE_KINDS:
            return key
        lighter = ProgramKey(DRAW_KINDS[ProgramKind(key.kind)], key.size)
        return lighter if lighter in self.programs.builders and self.programs.is_ready(lighter) else key

    def call(self, key: ProgramKey, *arguments: Any) -> Any:
        """Call a program. Its numpy arguments are what the step moves to the device on purpose: a compiled program
        moves one in 4 us, where `jax.device_put` takes 90."""
        with jax.transfer_guard_host_to_device("allow"):
            return (self.programs.callable.get(key) or self.programs[key])(*arguments)


def with_stacks(params: Any, stacks: Any) -> Any:
    """The parameters with the stacks of adapters, of each stage where layers are dealt to stages."""
    if isinstance(stacks, tuple):
        return tuple(map(AdaptedParams, params, stacks))
    return AdaptedParams(params, stacks)


def start_copy(tree: Any) -> Any:
    """Begin to copy arrays to the host, so that reading them later does not wait for the transfer."""
    for leaf in jax.tree.leaves(tree):
        leaf.copy_to_host_async()
    return tree
