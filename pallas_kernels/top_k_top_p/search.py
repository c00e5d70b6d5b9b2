"""A threshold search that sorts nothing: which float32 is the largest that enough of a row lies at or above.

All float32 values in order are numbered by the integers of their bits; sixteen passes over a row find the answer's
number two bits at a time, by weighing the row above three thresholds at once. Knows neither rows of logits nor memory:
callers say how to weigh, so XLA, TPU and GPU share it.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

NUM_PASSES = 16
NUM_THRESHOLDS = 3  # they cut what is left into quarters


def order_of_float(value: float) -> int:
    """A float32's place in the order of all float32 values, as an int32."""
    bits = int(np.float32(value).view(np.int32))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def float_of_order(order: jax.Array) -> jax.Array:
    """Inverse of `order_of_float`, on int32 arrays; what lies beyond the infinities counts as them."""
    order = jnp.clip(order, LOWEST, HIGHEST)
    return lax.bitcast_convert_type(order ^ ((order >> 31) & 0x7FFFFFFF), jnp.float32)


LOWEST, HIGHEST = order_of_float(-np.inf), order_of_float(np.inf)


def largest_threshold(
    weigh: Callable[[Sequence[jax.Array]], Sequence[jax.Array]], need: jax.Array, wanted: jax.Array | bool = True
) -> jax.Array:
    """The largest t with `weigh([t])[0] >= need`, exactly; -inf if there is none, or if the scalar `wanted` is false.

    `need` is float32 of any shape. `weigh` takes `NUM_THRESHOLDS` arrays of its shape and returns as many float32
    weights, which fall as thresholds rise. A search that is not wanted makes no pass.
    """

    def two_bits(i, low):
        step = jnp.left_shift(1, 30 - 2 * i).astype(jnp.int32)
        weights = weigh([float_of_order(low + (quarter + 1) * step) for quarter in range(NUM_THRESHOLDS)])
        return low + step * sum((weight >= need).astype(jnp.int32) for weight in weights)

    # Not a `where`: Triton's lowering gives a choice between two literals another type than the other bound's.
    num_passes = NUM_PASSES * jnp.asarray(wanted).astype(jnp.int32)
    return float_of_order(lax.fori_loop(0, num_passes, two_bits, jnp.full(need.shape, -(2**31), jnp.int32)))
