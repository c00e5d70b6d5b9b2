"""The largest of every row by `lax.top_k`: the definition. Knows nothing of backends."""

from typing import Any

import jax


def cannot_take(x_SV: Any, count: int) -> str | None:
    """It takes any rows."""
    return None


def top_k(x_SV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """See `top_k.top_k`.

    Behind barriers: XLA would merge later slices with the one inside `lax.top_k`, no longer recognise it on a CPU,
    and sort whole rows (measured: 100 times slower). One for each, since one for both becomes a barrier around the
    pair, on which jax 0.11's XLA aborts where the program is split over devices.
    """
    values_SC, columns_SC = jax.lax.top_k(x_SV, count)
    values_SC, columns_SC = jax.lax.optimization_barrier(values_SC), jax.lax.optimization_barrier(columns_SC)
    return values_SC, columns_SC
