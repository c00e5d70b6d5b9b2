"""Where the tokens of a step stand: the row of each, and its position there. Knows no op and no cache.

Letters: R rows, T tokens of the step, padding included.
"""

from typing import Any

import jax
import jax.numpy as jnp

NOWHERE = 2**31 - 1
"""An index that a gather fills and a scatter drops, and a block that no pool has; negative ones would count from the
end."""


def token_places(
    query_start_loc_R1: jax.Array, seq_lens_R: jax.Array, num_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(row_T, position_T, real_T) of the tokens of all rows, one row behind the other; behind the last row's, those
    that only pad the step are not real, and count as more of it. `seq_lens_R`: rows' lengths, these tokens included."""
    end_R, token_T = query_start_loc_R1[1:], jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.minimum(jnp.sum(end_R <= token_T[:, None], axis=-1), len(seq_lens_R) - 1)
    return row_T, (seq_lens_R - end_R)[row_T] + token_T, token_T < end_R[-1]


def first_visible(position: jax.Array, window: int | None) -> jax.Array:
    """The first position that a query at `position` sees."""
    return jnp.zeros_like(position) if window is None else jnp.maximum(position - window + 1, 0)


def pick(x_R: jax.Array, index: jax.Array) -> Any:
    """x_R[index], 0 where the index is out of range. Comparisons, because small gathers are slow on TPUs."""
    return jnp.sum(jnp.where(index[..., None] == jnp.arange(len(x_R)), x_R, 0), axis=-1, dtype=x_R.dtype)
