"""Moves experts between devices while the engine runs, so that each device has about the same to do (EPLB).

Programs count on the device how many tokens go to each expert of each layer (`models/decoder.py`). Every
`step_interval` steps the load of the last `window_size` says where experts should be; then weights move, and the tables
by which tokens find them are replaced. Weights, tables and counts are arguments of programs, so nothing is compiled.
What is decided follows from the number of steps and from what was counted, which all processes of an engine know alike.

Reading the counts of a step at once would wait for it. They are read `LAG` steps later, when that step is over.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpaged.config.expert_balance import ExpertBalance
from jaxpaged.layers.experts import Experts, map_experts, weights_of
from jaxpaged.messages import ProgramKey
from jaxpaged.params.sharding import num_expert_devices, num_ranks
from jaxpaged.worker.device import Device, start_copy
from jaxpaged.worker.expert_placing import Tables, balanced, device_loads, experts_of, sources
from jaxpaged.worker.programs.declare import ProgramKind
from jaxpaged.worker.step.expert_moves import (
    move_number,
    placed_blocks,
    placement_of,
    with_parts,
)

logger = logging.getLogger(__name__)

LAG = 2
"""Steps in flight, at most."""
WORTH_IT = 0.95
"""A layer's experts move if the most loaded device would have less than this share of its load."""


class ExpertBalancer:
    """Experts of `device.params` are spread over `mesh`. `after_move`: what follows them once some have moved."""

    def __init__(self, device: Device, options: ExpertBalance, mesh: Mesh):
        self._device, self._options, self._mesh = device, options, mesh
        self.after_move: Callable[[Device], None] = lambda device: None
        self._window = min(options.window_size, options.step_interval)
        self._num_rebalancings = self._num_moved_layers = 0
        self._balancedness = (1.0, 1.0)
        self.forget()

    def forget(self) -> None:
        """The counts on the device begin anew."""
        self._num_steps = 0
        self._before: Any = None
        self._after: Any = None

    def step_dispatched(self) -> None:
        """Call it after every step. Mostly it counts."""
        self._num_steps += 1
        interval = self._options.step_interval
        if self._num_steps == interval - self._window:
            self._before = self._counts()
        elif self._num_steps == interval:
            self._after = self._counts()
        elif self._num_steps == interval + LAG:
            self._rebalance()
            self._num_steps = LAG
            if interval - self._window <= LAG:
                self._before = self._after

    def stats(self) -> dict[str, Any]:
        """`balancedness`: mean load of a device over that of the most loaded one, in the last window, and what it would
        have been with experts where they are since."""
        return {
            "expert_rebalancings": self._num_rebalancings,
            "expert_layers_moved": self._num_moved_layers,
            "expert_balancedness_before": self._balancedness[0],
            "expert_balancedness_after": self._balancedness[1],
        }

    def _counts(self) -> Any:
        """The counts up to now, on their way to the host."""
        return start_copy(self._device.call(ProgramKey(ProgramKind.EXPERT_LOAD), self._device.state.kv[-1]))

    def _rebalance(self) -> None:
        before = None if self._before is None else np.asarray(self._before)
        load_LE = load_between(before, np.asarray(self._after), num_ranks(self._mesh))
        blocks, num_moved = placed_blocks(self._device.params), self._num_moved_layers
        layers = [self._balance_layer(block, load_E) for block, load_E in zip(blocks, load_LE, strict=True)]
        new = iter([block for block, _, _ in layers])
        self._device.params = map_experts(lambda p: p if p.placement is None else next(new), self._device.params)
        self._num_rebalancings += 1
        if self._num_moved_layers > num_moved:
            self.after_move(self._device)
        self._balancedness = (
            balancedness([before_X for _, before_X, _ in layers]),
            balancedness([after_X for _, _, after_X in layers]),
        )
        if self._options.log_balancedness:
            logger.info(
                "experts: balancedness %.3f in the last %d steps, %.3f with experts where they are now",
                self._balancedness[0],
                self._window,
                self._balancedness[1],
            )

    def _balance_layer(self, p: Any, load_E: np.ndarray) -> tuple[Experts, np.ndarray, np.ndarray]:
        """(the block with its experts where they should be, loads of devices before, and after)."""
        num_devices, device = num_expert_devices(self._mesh), self._device
        before_e = experts_of(Tables(np.asarray(p.placement.num_places_E), np.asarray(p.placement.place_ER)))
        after_e = balanced(load_E, len(before_e), num_devices)
        before_X, after_X = (device_loads(each, load_E, num_devices) for each in (before_e, after_e))
        if after_X.max() >= WORTH_IT * before_X.max():
            return p, before_X, before_X
        self._num_moved_layers += 1
        source_e = sources(before_e, after_e)
        key_of = lambda part: ProgramKey(ProgramKind.MOVE_EXPERTS, move_number(part, device.params))
        parts = [device.call(key_of(part), part, source_e) for part in weights_of(p)]
        placement = placement_of(after_e, len(load_E), self._mesh)
        return with_parts(p, parts).replace(placement=placement), before_X, after_X


def load_between(before: np.ndarray | None, after: np.ndarray, num_ranks: int) -> np.ndarray:
    """int64 [L, E]: the tokens that experts of each layer got between two counts, of all attention ranks, whose lines
    follow each other. Counts, uint32, wrap around, and so does their difference."""
    load_RLE = after if before is None else after - before
    return np.sum(np.split(load_RLE, num_ranks), axis=0, dtype=np.int64)


def balancedness(load_LX: list[np.ndarray]) -> float:
    """Mean load of a device over that of the most loaded one: the share of the devices' time that is used, where each
    layer waits for all of them."""
    most = sum(load_X.max() for load_X in load_LX)
    return float(sum(load_X.mean() for load_X in load_LX) / most) if most else 1.0
