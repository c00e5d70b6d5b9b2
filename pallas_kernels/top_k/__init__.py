"""The largest numbers of every row and where they are: a sampler's candidates, the likeliest tokens of a position.

Validates, picks a backend, and says why others were refused. `reference` is `lax.top_k`. On a CPU that is a partial
sort by one thread; `cpu` finds a bound first and then looks at little more than what is wanted. Both give the same
bits.
Letters: S rows, V numbers of a row, C of them wanted.
"""

from typing import Any

import jax

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "top_k", ("reference", "cpu")


def backends(platform: str, x_SV: Any = None, count: int | None = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if x_SV is None else [x_SV, count]))


def choose_backend(name: str, platform: str, x_SV: Any = None, count: int | None = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if x_SV is None else [x_SV, count]))


def top_k(x_SV: jax.Array, count: int, *, backend: str) -> tuple[jax.Array, jax.Array]:
    """(float32 values_SC, int32 columns_SC): the `count` largest of every row, the largest first.

    Of equal ones those to the left go first. NaN is above infinity, or below -infinity if its sign bit is set, and -0
    below 0. Raises ValueError for other types or shapes.
    """
    if x_SV.ndim != 2 or str(x_SV.dtype) != "float32":
        raise ValueError(f"x_SV is {x_SV.dtype}{list(x_SV.shape)}; accepted is float32[S, V].")
    if not 0 <= count <= x_SV.shape[1]:
        raise ValueError(f"count is {count}; accepted are 0 to {x_SV.shape[1]}, the numbers of a row.")
    return choosing.require(_OP, _BACKENDS, backend, x_SV, count).top_k(x_SV, count)
