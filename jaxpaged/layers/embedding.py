"""Token ids to vectors, and vectors to logits over the vocabulary. Knows no model."""

import jax
import jax.numpy as jnp


def embed(tokens_T: jax.Array, table_VD: jax.Array, scale: float | None) -> jax.Array:
    """Rows of the table, times `scale` rounded to the table's type. Ids must be in range."""
    x_TD = table_VD.at[tokens_T].get(mode="clip")
    return x_TD if scale is None else x_TD * jnp.asarray(scale, x_TD.dtype)


def vocabulary_logits(hidden_SD: jax.Array, table_VD: jax.Array, vocab_size: int, soft_cap: float | None) -> jax.Array:
    """Float32 logits [S, V]; columns from `vocab_size` on only pad the table and are -inf.

    With `soft_cap` c, logits are c * tanh(logits / c) (arXiv 2408.00118), behind a barrier: otherwise each of their
    readers may compute them again, with the product rounded or as part of a fused multiply-add.
    """
    precision = jax.lax.Precision.HIGHEST if hidden_SD.dtype == jnp.float32 else None
    logits_SV = jnp.einsum("SD,VD->SV", hidden_SD, table_VD, preferred_element_type=jnp.float32, precision=precision)
    if soft_cap is not None:
        logits_SV = jax.lax.optimization_barrier(soft_cap * jnp.tanh(logits_SV / soft_cap))
    if vocab_size == table_VD.shape[0]:
        return logits_SV
    return jnp.where(jnp.arange(table_VD.shape[0]) < vocab_size, logits_SV, -jnp.inf)
