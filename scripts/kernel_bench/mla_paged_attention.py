"""What a user would call instead of our latent attention: `jax.nn.dot_product_attention` over a dense cache.

Over latents that are one kv head, what is attended to being as wide as what is looked for; or over keys and values of
every head, as a cache without latents has them. Both read a cache that is already there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.serving import filled_arrays
from pallas_kernels.timing import Chain, fed_back

HEAD_DIM = 128  # DeepSeek-V3's keys and values without their rope part
MOST_BYTES = 16e9  # of keys and values of all heads: more would leave no room on smaller devices


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`."""
    latent, rope = case.latent_dim, case.rope_dim
    name = "jax.nn.dot_product_attention"
    return {
        f"dense latents, {name}": lambda: dense(case, 1, latent + rope, latent),
        f"dense keys and values per head, {name}": lambda: dense(case, case.num_heads, HEAD_DIM + rope, HEAD_DIM),
    }


def is_rectangular(case: Any) -> bool:
    """Whether a dense cache can hold the step without padding, with a plain causal mask."""
    cached, new = case.rows[0]
    return len(set(case.rows)) == 1 and (cached == 0 or new == 1)


def dense(case: Any, num_kv_heads: int, width: int, out_width: int) -> Chain | None:
    """Queries and keys have `width` numbers; values too, since JAX wants that, of which `out_width` count."""
    (cached, new), R = case.rows[0], len(case.rows)
    dims = ((R, new, case.num_heads, width), *[(R, cached + new, num_kv_heads, width)] * 2)
    dims = dims[:2] if num_kv_heads == 1 else dims  # latents are keys and values at once
    structs = tuple(jax.ShapeDtypeStruct(x, jnp.dtype(case.dtype)) for x in dims)
    if not is_rectangular(case) or sum(x.size * x.dtype.itemsize for x in structs) > MOST_BYTES:
        return None
    scale = (case.latent_dim + case.rope_dim) ** -0.5

    def attend(q_RQNW, *kv):
        out_RQNW = jax.nn.dot_product_attention(q_RQNW, kv[0], kv[-1], scale=scale, is_causal=new > 1)
        return out_RQNW[..., :out_width]

    q_RQNW, *kv = filled_arrays(structs)
    return fed_back(attend, q_RQNW, *kv)
