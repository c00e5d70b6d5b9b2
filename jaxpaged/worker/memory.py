"""What an engine keeps free on each device before it counts KV blocks: the same for an engine and for a plan of one."""

from dataclasses import dataclass

import jax

from jaxpaged.params.sharding import bytes_on_device
from jaxpaged.worker.programs.blueprint import Blueprint
from jaxpaged.worker.step.pooling import programs_for


@dataclass(frozen=True)
class Reserve:
    """Bytes of one device. `temporaries` is an estimate from shapes, before anything is compiled."""

    weights: int
    state: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.state + self.temporaries


def reserve_of(blueprint: Blueprint) -> Reserve:
    """What the engine of a blueprint needs besides its KV blocks."""
    rows = (blueprint.demand.max_num_seqs + 1) * blueprint.division.row_bytes
    return Reserve(blueprint.weight_bytes, state_bytes(blueprint) + rows, blueprint.temporary_bytes)


def state_bytes(blueprint: Blueprint) -> int:
    """What is kept from step to step besides KV blocks: block tables, last tokens, what sampling has seen or
    pooling has added up, and the hidden states of the last step. It does not depend on the number of KV blocks."""
    _, *state = programs_for(blueprint, blueprint.division.kv_cache(1)).shapes.state
    return sum(bytes_on_device(leaf) for leaf in jax.tree.leaves(state))
