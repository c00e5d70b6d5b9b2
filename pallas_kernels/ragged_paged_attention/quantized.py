"""Keys and values of 8 bits with scales. Scales are data: no program depends on their values.

What is stored times its scale is what is meant. `kv_scales` says where scales come from: "none" (they are 1), "head"
(one for each kv head, found by whoever calibrated the model), or "token" (one for each token and head, so that its
largest number is the largest that the type has). This module knows nothing of attention and of layouts.
"""

from typing import Any

import jax
import jax.numpy as jnp

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
"""The types of 8 bits and the largest number that each stores."""
KINDS = ("none", "head", "token")


def is_quantized(dtype: Any) -> bool:
    return jnp.dtype(dtype) in LARGEST


def why_not(kv_dtype: Any, kv_scales: str) -> str | None:
    """Why a cache of `kv_dtype` cannot have scales of that kind, naming what is accepted, or None."""
    if kv_scales not in KINDS:
        return f"kv_scales = {kv_scales!r}; accepted are {', '.join(map(repr, KINDS))}"
    if kv_scales != "none" and not is_quantized(kv_dtype):
        accepted = ", ".join(str(dtype) for dtype in LARGEST)
        return f"kv_scales = {kv_scales!r} for a cache of {jnp.dtype(kv_dtype)}; accepted are {accepted}"
    if kv_scales == "none" and jnp.dtype(kv_dtype) == jnp.int8:
        return "kv_scales = 'none' for a cache of int8, which would keep integers only; accepted are 'head', 'token'"
    return None


def kind_of(scales: tuple[Any, ...]) -> str:
    """Which kind of scales these arrays are."""
    if not scales:
        return "none"
    return "head" if scales[0].ndim == 1 else "token"


def quantize(x_TKH: jax.Array, scale_TK: jax.Array, dtype: Any) -> jax.Array:
    """What is stored: x / scale, rounded to the nearest, cut off at the largest number of `dtype`."""
    largest = LARGEST[jnp.dtype(dtype)]
    x_TKH = jnp.clip(x_TKH.astype(jnp.float32) / scale_TK[..., None], -largest, largest)
    return (jnp.round(x_TKH) if jnp.dtype(dtype) == jnp.int8 else x_TKH).astype(dtype)


def token_scales(x_TKH: jax.Array, dtype: Any) -> jax.Array:
    """scale_TK that brings the largest number of each token and head to the largest of `dtype`; 1 for zeros. NaN where
    any of them is, so that what is read is none either, though int8 has no such number."""
    top_TK = jnp.max(jnp.abs(x_TKH.astype(jnp.float32)), axis=-1)
    return jnp.where(top_TK == 0, 1.0, top_TK / LARGEST[jnp.dtype(dtype)])


def quantize_new(x_TKH: jax.Array, scale: jax.Array | None, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(stored_TKH, scale_TK) of new keys or values; `scale` is what the cache has for them, see `KVTensor`."""
    if scale is None:
        scale_TK = jnp.ones(x_TKH.shape[:2], jnp.float32)
    elif scale.ndim == 1:
        scale_TK = jnp.broadcast_to(scale, x_TKH.shape[:2])
    else:
        scale_TK = token_scales(x_TKH, dtype)
    return quantize(x_TKH, scale_TK, dtype), scale_TK
