"""What a backend must have: a module of this package, or an object of a stranger's that 'module:NAME' names."""

import functools
import importlib
from typing import Any, Protocol

import jax

from pallas_kernels.ragged_paged_attention.layout import KVLayout

PARTS = ("LAYOUT", "why_not", "cannot_take", "shared_work", "make_plan", "attention")


class Backend(Protocol):
    """`reference` is the definition of what each does, and has the least of it."""

    LAYOUT: KVLayout

    def why_not(self, platform: str) -> str | None:
        """Why it cannot run on "cpu", "gpu" or "tpu"; None: it can."""

    def cannot_take(self, **problem: Any) -> str | None:
        """What it does not take of numbers of heads, widths, block sizes and types; None: it takes all of it."""

    def shared_work(self, num_tokens: int, block_size: int) -> Any:
        """See `shared_work` of the package; None: every row's context is read by itself."""

    def make_plan(self, query_start_loc_R1: jax.Array, *where: jax.Array, **settings: Any) -> Any:
        """What it computes once a step for all layers: a pytree."""

    def attention(self, q_TNH: jax.Array, *rest: Any, **settings: Any) -> tuple[jax.Array, Any, Any]:
        """(out_TNH, the cache's arrays with this step's tokens, its scales); see `ragged_paged_attention`."""


def is_place(name: str) -> bool:
    """Whether a backend's name says where it is to be imported from."""
    return ":" in name


@functools.cache
def imported(place: str, parts: tuple[str, ...] = PARTS) -> Any:
    """The backend at 'module:NAME', of attention or of an op that has other parts. Raises ValueError where it cannot be
    imported, or lacks a part."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs a stranger's code
        raise ValueError(f"the backend {place!r} cannot be imported: {type(error).__name__}: {error}") from error
    if missing := [part for part in parts if not hasattr(found, part)]:
        raise ValueError(f"the backend {place!r} has no {', '.join(missing)}. It needs {', '.join(parts)}.")
    return found
