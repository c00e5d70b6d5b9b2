"""Attention of whole texts to themselves, without a cache: plain products and a softmax, which can be differentiated.

Texts lie in rows of equal length. A row may hold several, one behind the other: their tokens have numbers, the same for
all tokens of a text and another one for the next text. This module knows neither models nor kernels.

Letters: R rows, C tokens of a row and S those that they see, T all tokens, row after row; v numbers of a value.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh


@struct.dataclass
class DenseBatch:
    """What a layer knows of whole texts, in place of `AttentionBatch` or `StateBatch`. A token sees those of its text
    up to itself: of a layer with a window the last `window`, itself included; of one with chunks those in its own.
    `mesh`: the devices that experts lie on."""

    segments_RC: jax.Array
    mesh: Mesh = struct.field(pytree_node=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    chunk: int | None = struct.field(pytree_node=False, default=None)

    @property
    def num_tokens(self) -> int:
        """All of them: what pads a row is a text, too."""
        return self.segments_RC.size

    def rotates(self, kv: Any) -> bool:
        """Queries and keys come rotated."""
        return False


def positions_in(segments_RC: jax.Array) -> jax.Array:
    """Where each token stands in its text: int32 [R, C]."""
    column_C = jnp.arange(segments_RC.shape[1], dtype=jnp.int32)
    is_first_RC = segments_RC != jnp.roll(segments_RC, 1, axis=1)
    first_RC = jnp.where(is_first_RC | (column_C == 0), column_C, 0)
    return column_C - jax.lax.cummax(first_RC, axis=1)


def visible_tokens(batch: DenseBatch) -> jax.Array:
    """Whether a token sees another one of its row: bool [R, C, S]."""
    segments_RC, position_RC = batch.segments_RC, positions_in(batch.segments_RC)
    column_C = jnp.arange(segments_RC.shape[1])
    visible_RCS = (segments_RC[:, :, None] == segments_RC[:, None, :]) & (column_C[:, None] >= column_C)
    query_RC1, key_R1S = position_RC[:, :, None], position_RC[:, None, :]
    if batch.window is not None:
        visible_RCS &= query_RC1 - key_R1S < batch.window
    if batch.chunk is not None:
        visible_RCS &= key_R1S >= query_RC1 - query_RC1 % batch.chunk
    return visible_RCS


def dense_attention(
    batch: DenseBatch,
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKv: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """[T, N, v] in the type of the queries; in between float32. The settings are those of `attention.attend`."""
    (R, C), (T, N, H), K = batch.segments_RC.shape, q_TNH.shape, k_TKH.shape[1]
    settings: dict[str, Any] = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    q_RCKGH, k_RSKH = q_TNH.reshape(R, C, K, N // K, H), k_TKH.reshape(R, C, K, H)
    score_RKGCS = jnp.einsum("rckgh,rskh->rkgcs", q_RCKGH, k_RSKH, **settings) * scale
    if soft_cap is not None:
        score_RKGCS = soft_cap * jnp.tanh(score_RKGCS / soft_cap)
    score_RKGCS = jnp.where(visible_tokens(batch)[:, None, None], score_RKGCS, -jnp.inf)
    if sinks_N is not None:
        sinks_KG11 = sinks_N.astype(jnp.float32).reshape(K, N // K, 1, 1)
        sinks_RKGC1 = jnp.broadcast_to(sinks_KG11, (*score_RKGCS.shape[:-1], 1))
        score_RKGCS = jnp.concatenate([score_RKGCS, sinks_RKGC1], axis=-1)
    weight_RKGCS = jax.nn.softmax(score_RKGCS, axis=-1)[..., :C]
    v_RSKv = v_TKv.reshape(R, C, K, -1).astype(jnp.float32)
    out_RCKGv = jnp.einsum("rkgcs,rskv->rckgv", weight_RKGCS, v_RSKv, **settings)
    return out_RCKGv.reshape(T, N, -1).astype(q_TNH.dtype)
