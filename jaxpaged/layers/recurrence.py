"""Who computes what layers with recurrent states have of their own: our layers, or an object of a stranger's that
'module:NAME' names (option `recurrence_backend`).

It gets what one device has, within the one `shard_map` of its layer. This module knows neither models nor requests.

Letters: D channels of this device, J inputs before a token that it sees, C entries of a ring (`short_conv.py`), B
blocks.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxpaged.layers.attention import AttentionContext
from jaxpaged.layers.state import StateMetadata
from pallas_kernels.ragged_paged_attention.backend import imported

REFERENCE = "reference"
"""Our own, in XLA."""
PARTS = ("why_not", "short_conv")


class RecurrenceBackend(Protocol):
    """What is traced has no side effects."""

    def why_not(self, platform: str) -> str | None:
        """Why it cannot run on "cpu", "gpu" or "tpu"; None: it can."""

    def short_conv(
        self,
        x_TD: jax.Array,
        weight_DJ: jax.Array,
        bias_D: jax.Array | None,
        ring: jax.Array,
        blocks: jax.Array,
        metadata: StateMetadata,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(y [T, D] in the type of x, the rings and the snapshots behind this step) of a causal convolution of each
        channel; `weight_DJ` is float32 [D, J + 1], that of the token itself last. `ring` is [rows, C, D], `blocks`
        [B, J, D]; both are donated. `short_conv.on_device` is the definition."""


def backend_at(place: str) -> RecurrenceBackend:
    """Raises ValueError where it cannot be imported, or lacks a part."""
    return imported(place, PARTS)


def check_backend(name: str, platform: str) -> None:
    """Raise ValueError unless it can run there."""
    if name != REFERENCE and (reason := backend_at(name).why_not(platform)) is not None:
        raise ValueError(f"backend {name!r} cannot run on {platform!r}: {reason}. Use {REFERENCE!r}.")


def chosen(context: AttentionContext, part: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The part of the engine's backend. What a stranger's returns is held to the shapes and types of ours. Raises
    ValueError for others."""
    name = context.recurrence
    if name == REFERENCE:
        return ours
    theirs = getattr(backend_at(name), part)

    def checked(*operands: Any) -> Any:
        found, wanted = theirs(*operands), jax.eval_shape(ours, *operands)
        shown = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
        if shown(found) != shown(wanted):
            raise ValueError(f"{part} of the backend {name!r} gave {shown(found)}; it must give {shown(wanted)}.")
        return found

    return checked
