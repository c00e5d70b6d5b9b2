"""Token ids to vectors, and vectors to logits over the vocabulary. Knows no model."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxpaged.layers.linear import XLA, Linear, adapted_product, matrix_product, rows_product
from jaxpaged.layers.lora import BoundLora, adapted_rows
from jaxpaged.params.quantized import QuantizedArray


@struct.dataclass
class AdaptedTable:
    """A table, and what adapters add to it: to rows that are looked up, or to logits."""

    table: jax.Array | QuantizedArray
    lora: BoundLora

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape


Table = jax.Array | QuantizedArray | AdaptedTable
"""[V, D]"""


def plain_table(table_VD: Any) -> Any:
    """The table without adapters."""
    return table_VD.table if isinstance(table_VD, AdaptedTable) else table_VD


def embed(tokens_T: jax.Array, table_VD: Table, scale: float | None) -> jax.Array:
    """Rows of the table, times `scale` rounded to the table's type. Ids must be in range."""
    x_TD = rows_of(table_VD, tokens_T)
    return x_TD if scale is None else x_TD * jnp.asarray(scale, x_TD.dtype)


def rows_of(table_VD: Table, ids_T: jax.Array) -> jax.Array:
    """Rows [T, D] in the table's type."""
    if isinstance(table_VD, AdaptedTable):
        return adapted_rows(rows_of(table_VD.table, ids_T), ids_T, table_VD.lora)
    if not isinstance(table_VD, QuantizedArray):
        return table_VD.at[ids_T].get(mode="clip")
    scale_T, value_TD = (part.at[ids_T].get(mode="clip") for part in (table_VD.scales, table_VD.values))
    return (value_TD.astype(jnp.float32) * scale_T[:, None]).astype(table_VD.dtype)


def vocabulary_logits(
    hidden_SD: jax.Array, table_VD: Table, vocab_size: int, soft_cap: float | None, backend: str = XLA
) -> jax.Array:
    """Float32 logits [S, V]; columns from `vocab_size` on only pad the table and are -inf.

    With `soft_cap` c, logits are c * tanh(logits / c) (arXiv 2408.00118), behind a barrier: otherwise each of their
    readers may compute them again, with the product rounded or as part of a fused multiply-add.
    """
    if isinstance(table_VD, AdaptedTable):
        p = Linear(table_VD.table, None, backend, table_VD.lora)
        logits_SV = adapted_product(hidden_SD, p, table_VD.lora, jnp.float32)
    else:
        product = rows_product if isinstance(table_VD, QuantizedArray) else matrix_product
        logits_SV = product(hidden_SD, table_VD, jnp.float32, backend)
    if soft_cap is not None:
        logits_SV = jax.lax.optimization_barrier(soft_cap * jnp.tanh(logits_SV / soft_cap))
    if vocab_size == table_VD.shape[0]:
        return logits_SV
    return jnp.where(jnp.arange(table_VD.shape[0]) < vocab_size, logits_SV, -jnp.inf)
