"""Rows normalised by their root mean square (arXiv 1910.07467), or less their mean (1607.06450), times a weight.

Validates, picks a backend, and says why others were refused. `reference` is XLA, and as good as any on TPUs and GPUs.
On a CPU it is four kernels for each kind of place in a program, and they take long to compile; `cpu` is one call.
Letters: T rows, D numbers of a row.
"""

from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "rms_norm", ("reference", "cpu")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class How:
    """`eps` is added to the mean square. `is_offset`: the weight says how far the factor is from 1, and only the
    product is rounded; otherwise so is the row before it. `is_centred`: the mean is taken off first."""

    eps: float
    is_offset: bool = False
    is_centred: bool = False


def backends(platform: str, x_TD: Any = None, weight_D: Any = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if weight_D is None else [x_TD, weight_D]))


def choose_backend(name: str, platform: str, x_TD: Any = None, weight_D: Any = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if weight_D is None else [x_TD, weight_D]))


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, how: How, *, backend: str) -> jax.Array:
    """Rows of the type of x, computed in float32. Raises ValueError for other operands."""
    accepted = x_TD.ndim == 2 and str(x_TD.dtype) in DTYPES and weight_D.dtype == x_TD.dtype
    if not accepted or weight_D.shape != x_TD.shape[1:]:
        raise ValueError(
            f"x_TD is {x_TD.dtype}{list(x_TD.shape)} and weight_D {weight_D.dtype}{list(weight_D.shape)}; accepted are "
            f"rows and as long a weight, both {' or '.join(DTYPES)}."
        )
    return choosing.require(_OP, _BACKENDS, backend, x_TD, weight_D).rms_norm(x_TD, weight_D, how)
