"""What adapters add in XLA: the definition, and what is sharded by itself.

The ranks of all slots are multiplied at once, and those of others are masked between the two products. Where there are
fewer tokens than slots, each takes its own ranks from the stacks, and no others: one by one up to four tokens, since
XLA:CPU is slow at products that differ by token.

Numerics: what A makes is rounded to the type of B before it is multiplied. Products are given in the type of the base,
so that XLA may add to it within the product of B.
"""

from typing import Any

import jax
import jax.numpy as jnp

MOST_ALONE = 4


def cannot_take(x_TI: Any, a_SrI: Any) -> str | None:
    """It takes any operands."""
    return None


def lora_matmul(
    x_TI: jax.Array,
    a_SrI: jax.Array,
    b_SrO: jax.Array,
    slot_T: jax.Array,
    base_TO: jax.Array,
    dtype: Any,
    *,
    interpret: Any,
) -> jax.Array:
    """See `lora_matmul.lora_matmul`; there is nothing to interpret."""
    product = _of_few if len(x_TI) < len(a_SrI) else _of_all
    return (base_TO + product(x_TI, a_SrI, b_SrO, slot_T, base_TO.dtype)).astype(dtype)


def _of_all(x_TI: jax.Array, a_SrI: jax.Array, b_SrO: jax.Array, slot_T: jax.Array, dtype: Any) -> jax.Array:
    """[T, O] in `dtype`."""
    S, r, O = b_SrO.shape
    u_TK = _product("TI,KI->TK", x_TI, a_SrI.reshape(S * r, -1))
    is_own_TS = slot_T[:, None] == jnp.arange(S)
    u_TK = jnp.where(jnp.repeat(is_own_TS, r, axis=1), u_TK, 0)
    return _product("TK,KO->TO", u_TK.astype(b_SrO.dtype), b_SrO.reshape(S * r, O), dtype)


def _of_few(x_TI: jax.Array, a_SrI: jax.Array, b_SrO: jax.Array, slot_T: jax.Array, dtype: Any) -> jax.Array:
    """The same from each token's own ranks."""
    has_slot_T1 = slot_T[:, None] >= 0
    if len(x_TI) > MOST_ALONE:
        u_Tr = jnp.where(has_slot_T1, _product("TI,TrI->Tr", x_TI, a_SrI[slot_T]), 0)
        return _product("Tr,TrO->TO", u_Tr.astype(b_SrO.dtype), b_SrO[slot_T], dtype)
    rows = []
    for x_I, slot, has_slot_1 in zip(x_TI, slot_T, has_slot_T1):
        u_r = jnp.where(has_slot_1, _product("I,rI->r", x_I, a_SrI[slot]), 0)
        rows.append(_product("r,rO->O", u_r.astype(b_SrO.dtype), b_SrO[slot], dtype))
    return jnp.stack(rows)


def _product(letters: str, x: jax.Array, w: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.einsum(letters, x, w, precision=precision, preferred_element_type=dtype)
