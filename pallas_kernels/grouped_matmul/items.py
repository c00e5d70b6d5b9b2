"""The list of work: tiles of tokens, each with the expert that they go to. Knows no weights."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import ceil_div


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """`num_items` real ones, and after them copies of the last with no token. All int32.

    Item i works on the tile that begins at token `first_I[i]`, in which the tokens [start, end) of expert
    `expert_I[i]` are its own. Expert E stands for tokens beyond the last group, whose outputs are zero, and for
    copies.
    """

    num_items: jax.Array
    expert_I: jax.Array
    first_I: jax.Array
    start_I: jax.Array
    end_I: jax.Array


def make_items(group_sizes_E: jax.Array, num_tokens: int, tile: int, *, aligned: bool) -> Items:
    """Items in the order of tokens. Tiles begin at multiples of `tile` if `aligned`, else where a group does.

    A tile that several groups share is then an item of each, one after the other. Every token is in an item.
    """
    E = len(group_sizes_E)
    rest = jnp.maximum(num_tokens - jnp.sum(group_sizes_E), 0)
    size_G = jnp.append(group_sizes_E, rest)
    end_G = jnp.cumsum(size_G)
    start_G = end_G - size_G
    first_G = start_G // tile * tile if aligned else start_G
    num_G = jnp.where(size_G > 0, ceil_div(end_G - first_G, tile), 0)
    last_G = jnp.cumsum(num_G)
    item_I = jnp.arange(ceil_div(num_tokens, tile) + E)
    real_I = item_I < last_G[-1]
    item_I = jnp.minimum(item_I, last_G[-1] - 1)
    group_I = jnp.sum(last_G <= item_I[:, None], axis=1)
    first_I = first_G[group_I] + (item_I - (last_G - num_G)[group_I]) * tile
    end_I = jnp.where(real_I, end_G[group_I], 0)
    arrays = last_G[-1:], jnp.where(real_I, group_I, E), first_I, start_G[group_I], end_I
    return Items(*(x.astype(jnp.int32) for x in arrays))
