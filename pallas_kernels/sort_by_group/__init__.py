"""The numbers of what is in group 0, then of what is in group 1, and so on: pairs of a token and an expert, sorted.

Validates, picks a backend, and says why others were refused. `reference` sorts in XLA. On a CPU that is slow, and XLA
cannot store programs that sort, so that every process would compile those with experts again; `cpu` counts. Both give
the same numbers. Letters: P things, E groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "sort_by_group", ("reference", "cpu")


def backends(platform: str, group_P: Any = None, num_groups: int | None = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if group_P is None else [group_P, num_groups]))


def choose_backend(name: str, platform: str, group_P: Any = None, num_groups: int | None = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if group_P is None else [group_P, num_groups]))


def sort_by_group(group_P: jax.Array, num_groups: int, *, backend: str) -> tuple[jax.Array, jax.Array]:
    """(order_P, place_P), int32: the things in the order of their groups, those of one in the order that they have, and
    where each of them stands there: `order_P[place_P]` are 0, 1, 2, ...

    Groups are int32, from 0 on; `num_groups` and more stand for none, which comes last. Raises ValueError for others.
    """
    if group_P.ndim != 1 or group_P.dtype != jnp.int32:
        raise ValueError(f"group_P is {group_P.dtype}{list(group_P.shape)}; accepted is int32[P].")
    return choosing.require(_OP, _BACKENDS, backend, group_P, num_groups).sort_by_group(group_P, num_groups)
