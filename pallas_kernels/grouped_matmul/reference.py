"""Each token times its expert's weight, one tile of one expert's tokens after the other: the definition, and the CPU
backend where machine code of our own cannot be. Knows nothing of backends.

Numerics: quantised values are exact in x's type; one scale per output channel is applied to the float32 sum, while
group-wise weights are dequantised in float32 and rounded to x's type.

Cost: an expert's weight is read once for each tile of its tokens, and not at all if it has none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.items import make_items
from pallas_kernels.quantized_matmul import QuantizedWeight
from pallas_kernels.quantized_matmul.reference import dequantize
from pallas_kernels.token_places import NOWHERE

TILES, LARGEST_TILE = ((4, 1), (8, 8), (16, 16)), 32
"""(tokens of a tile, tokens per expert up to which it was the fastest on a CPU): few tokens leave most of one empty."""


def cannot_take(x_TD: Any, weights: Any) -> str | None:
    """It takes any operands."""
    return None


def grouped_matmul(x_TD: jax.Array, weights: Any, group_sizes_E: jax.Array, *, interpret: Any) -> jax.Array:
    """See `grouped_matmul.grouped_matmul`; there is nothing to interpret."""
    T, (E, F, _) = x_TD.shape[0], weights.values_EFD.shape
    tile = next((tile for tile, most in TILES if most * E >= T), LARGEST_TILE)
    items = make_items(group_sizes_E, T, tile, aligned=False)

    def multiply(i, out_TF):
        expert = items.expert_I[i]
        token_t = items.first_I[i] + jnp.arange(tile)
        x_tD = x_TD.at[token_t].get(mode="clip")
        of_expert = jax.tree.map(lambda x: x[expert], weights)
        out_tF = _product(x_tD, of_expert.values_EFD, of_expert.scale_ECF, of_expert.zero_ECF)
        return out_TF.at[jnp.where(token_t < items.end_I[i], token_t, NOWHERE)].set(out_tF, mode="drop")

    num_with_expert = jnp.sum(items.expert_I < E)  # they come first; what is beyond the last group stays zero
    return lax.fori_loop(0, num_with_expert, multiply, jnp.zeros((T, F), x_TD.dtype))


def _product(x_tD: jax.Array, values_FD: jax.Array, scale_CF: jax.Array | None, zero_CF: jax.Array | None) -> jax.Array:
    """x times one expert's transposed weight, in x's type."""
    scale_1F = jnp.ones((), jnp.float32) if scale_CF is None else scale_CF
    if scale_CF is not None and (scale_CF.shape[0] > 1 or zero_CF is not None):
        values_FD, scale_1F = dequantize(QuantizedWeight(values_FD, scale_CF, zero_CF)), jnp.ones((), jnp.float32)
    precision = lax.Precision.HIGHEST if x_tD.dtype == jnp.float32 else None
    out_tF = lax.dot_general(
        x_tD,
        values_FD.astype(x_tD.dtype),
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return (out_tF * scale_1F.astype(jnp.float32)).astype(x_tD.dtype)
