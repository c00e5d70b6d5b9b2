"""What layers with recurrent states know of a step: where each request's state is, and which snapshots are taken.

A state lies in the row of its request, and a request that begins behind tokens which another has computed finds it in a
block, a snapshot. Which arrays a state has is the layer's own business. This module knows neither models nor requests.

Letters: P places of a step behind which snapshots may be taken.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from jaxpaged.layers.attention import AttentionContext
from pallas_kernels.token_places import NOWHERE, token_places


@struct.dataclass
class StateTensor:
    """The states of one layer, in as many arrays as its spec has: `rows` [rows, ...] of the requests that live on the
    device, and `blocks` [B, ...] of snapshots."""

    rows: list[jax.Array]
    blocks: list[jax.Array]


@struct.dataclass
class StateMetadata:
    """A step's requests and tokens, int32.

    row_R: the row of each request; NOWHERE if it has no token in the step. num_before_R: its tokens before the step.
    snapshot_R: the block with the state behind these; 0: its row has it, or there are none.
    seq_T: which request each token belongs to. nth_T: how many of its tokens in the step come before.
    border_P: tokens behind which snapshots are taken. block_P: the blocks that get them; NOWHERE: no snapshot.
    """

    query_start_loc_R1: jax.Array
    row_R: jax.Array
    num_before_R: jax.Array
    snapshot_R: jax.Array
    seq_T: jax.Array
    nth_T: jax.Array
    border_P: jax.Array
    block_P: jax.Array


@struct.dataclass
class StateBatch:
    """What a step tells layers that share a table of snapshots."""

    metadata: StateMetadata
    context: AttentionContext = struct.field(pytree_node=False)

    @property
    def num_tokens(self) -> jax.Array:
        """Those that do not pad the step."""
        return self.metadata.query_start_loc_R1[-1]

    @property
    def mesh(self) -> Mesh:
        return self.context.mesh


def state_metadata(
    row_R: jax.Array,
    query_start_loc_R1: jax.Array,
    seq_lens_R: jax.Array,
    tables_RM: jax.Array,
    *,
    num_tokens: int,
    block_size: int,
) -> StateMetadata:
    """`seq_lens_R`: rows' lengths, this step's tokens included. Entries of `tables_RM` are blocks of snapshots, 0 where
    there is none."""
    num_new_R = query_start_loc_R1[1:] - query_start_loc_R1[:-1]
    num_before_R = seq_lens_R - num_new_R
    begins_behind_block_R = (num_before_R > 0) & (num_before_R % block_size == 0)
    last_R = jnp.maximum(num_before_R // block_size - 1, 0)
    read_R = jnp.take_along_axis(tables_RM, last_R[:, None], axis=1)[:, 0]

    seq_T, position_T, real_T = token_places(query_start_loc_R1, seq_lens_R, num_tokens)
    written_T = tables_RM[seq_T, jnp.minimum(position_T // block_size, tables_RM.shape[1] - 1)]
    written_T = jnp.where(real_T & ((position_T + 1) % block_size == 0) & (written_T > 0), written_T, NOWHERE)
    border_P, block_P = jnp.arange(num_tokens, dtype=jnp.int32), written_T
    most = num_tokens // block_size + len(row_R)
    if most < num_tokens:
        (border_P,) = jnp.nonzero(written_T != NOWHERE, size=most, fill_value=num_tokens)
        block_P = jnp.where(border_P < num_tokens, written_T[jnp.minimum(border_P, num_tokens - 1)], NOWHERE)
        border_P = jnp.minimum(border_P, num_tokens - 1).astype(jnp.int32)
    return StateMetadata(
        query_start_loc_R1=query_start_loc_R1,
        row_R=jnp.where(num_new_R > 0, row_R, NOWHERE),
        num_before_R=num_before_R,
        snapshot_R=jnp.where(begins_behind_block_R, read_R, 0),
        seq_T=seq_T,
        nth_T=position_T - num_before_R[seq_T],
        border_P=border_P,
        block_P=block_P,
    )
