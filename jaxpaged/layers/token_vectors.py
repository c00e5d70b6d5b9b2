"""A vector for every token, kept in a paged cache like keys and values, but whole: written, and read again one token
later.

The cache is an array `[blocks, slots, D]`, equal on all devices. Where a token lies follows from the metadata of
attention. This module knows neither attention nor models.

Letters: B blocks, S slots of a block.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention import AttentionMetadata
from pallas_kernels.token_places import NOWHERE, token_places


def write_vectors(cache_BSD: jax.Array, metadata: AttentionMetadata, x_TD: jax.Array) -> jax.Array:
    """The cache with the vectors of this step's tokens; those of padding are written nowhere."""
    row_T, position_T, real_T = token_places(metadata.query_start_loc_R1, metadata.seq_lens_R, len(x_TD))
    block_T, slot_T = slots(cache_BSD, metadata, row_T, position_T)
    block_T = jnp.where(real_T, block_T, NOWHERE)
    return cache_BSD.at[block_T, slot_T].set(x_TD.astype(cache_BSD.dtype), mode="drop")


def vectors_before(cache_BSD: jax.Array, metadata: AttentionMetadata, num_tokens: int) -> jax.Array:
    """[T, D]: for each of this step's tokens the vector of the one before it in its request, 0 for the first."""
    row_T, position_T, real_T = token_places(metadata.query_start_loc_R1, metadata.seq_lens_R, num_tokens)
    block_T, slot_T = slots(cache_BSD, metadata, row_T, jnp.maximum(position_T - 1, 0))
    has_one_T = real_T & (position_T > 0)
    return jnp.where(has_one_T[:, None], cache_BSD.at[block_T, slot_T].get(mode="clip"), 0)


def slots(
    cache_BSD: jax.Array, metadata: AttentionMetadata, row_T: jax.Array, position_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The block and the slot of places in requests."""
    block_size = cache_BSD.shape[1]
    block_T = metadata.block_tables_RM.at[row_T, position_T // block_size].get(mode="clip")
    return block_T, position_T % block_size
