"""The gradient of `grouped_matmul` by tokens and by weights of a float type: two products more.

That by tokens is the same op with each weight transposed. That by weights sums products of tokens within each group,
one tile of one expert's tokens after the other, in XLA: `jax.lax.ragged_dot_general` multiplies every token for every
expert. Knows nothing of backends but what `multiply` says. Letters: T tokens, E experts, D inputs, F outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.grouped_matmul.items import make_items
from pallas_kernels.shapes import ceil_div
from pallas_kernels.token_places import NOWHERE

LEAST_TILE, LARGEST_TILE = 32, 512
"""Tokens of a tile. An expert's sum is read and written once for each of them, so large ones are better where experts
have many tokens, and few tokens leave most of one empty."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def with_gradients(
    multiply: Callable[[Any, Any, Any], Any], x_TD: jax.Array, values_EFD: jax.Array, group_sizes_E: jax.Array
) -> jax.Array:
    """`multiply(x_TD, values_EFD, group_sizes_E)`, a grouped product of other operands, too."""
    return multiply(x_TD, values_EFD, group_sizes_E)


def _forward(multiply, x_TD, values_EFD, group_sizes_E):
    return multiply(x_TD, values_EFD, group_sizes_E), (x_TD, values_EFD, group_sizes_E)


def _backward(multiply, operands, slope_TF):
    x_TD, values_EFD, group_sizes_E = operands
    slope_TD = multiply(slope_TF, values_EFD.swapaxes(1, 2), group_sizes_E)
    slope_EFD = _products_of_groups(slope_TF, x_TD, group_sizes_E).astype(values_EFD.dtype)
    return slope_TD, slope_EFD, np.zeros(group_sizes_E.shape, jax.dtypes.float0)


with_gradients.defvjp(_forward, _backward)


def _products_of_groups(y_TF: jax.Array, x_TD: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    """Float32 [E, F, D]: for each group the sum of y x over its tokens."""
    T, E = len(x_TD), len(group_sizes_E)
    tile = min(LARGEST_TILE, max(LEAST_TILE, 1 << (ceil_div(T, E) - 1).bit_length()))
    items = make_items(group_sizes_E, T, tile, aligned=False)
    precision = lax.Precision.HIGHEST if x_TD.dtype == jnp.float32 else None

    def add(i, sum_EFD):
        token_t = items.first_I[i] + jnp.arange(tile)
        own_t = jnp.where(token_t < items.end_I[i], token_t, NOWHERE)
        y_tF, x_tD = (each.at[own_t].get(mode="fill", fill_value=0) for each in (y_TF, x_TD))
        product_FD = jnp.einsum("tf,td->fd", y_tF, x_tD, precision=precision, preferred_element_type=jnp.float32)
        return sum_EFD.at[items.expert_I[i]].add(product_FD)

    zeros_EFD = jnp.zeros((E, y_TF.shape[1], x_TD.shape[1]), jnp.float32)
    return lax.fori_loop(0, jnp.sum(items.expert_I < E), add, zeros_EFD)
