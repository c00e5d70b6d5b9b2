"""Sampling masks as one number a row: the least logit that top_k, top_p and min_p leave to be drawn.

Validates, picks a backend, and says why others were refused. `reference` sorts the vocabulary, the definition. The
others search for thresholds instead (`search.py`): `xla` reads the logits from memory 16 times for each of top_k and
top_p; `tpu` and `gpu` read them once, a tile of rows then stays in VMEM, or a row in the second-level cache. On a CPU
core `xla` takes 1.6 ms for a row of 262,144 logits where sorting takes 80.

This module knows nothing of drawing. Letters: S rows that are sampled from, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "top_k_top_p", ("reference", "xla", "tpu", "gpu")


def backends(platform: str, logits_SV: Any = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the logits, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if logits_SV is None else [logits_SV]))


def choose_backend(name: str, platform: str, logits_SV: Any = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if logits_SV is None else [logits_SV]))


def least_logits(
    logits_SV: jax.Array,
    top_k_S: jax.Array,
    top_p_S: jax.Array,
    min_p_S: jax.Array,
    temperature_S: jax.Array | None = None,
    *,
    backend: str,
    interpret: Any = False,
) -> jax.Array:
    """least_S: row s may draw the tokens with logit >= least[s]; -inf if it may draw any.

    A token's probability is that of its logit over the temperature, 1 if none is given. min_p goes first, by
    probability relative to the largest; then top_k, where tokens that tie with the k-th stay; then top_p over what is
    left, renormalised: a token stays while the tokens strictly more likely than it have less than top_p together. So
    one always stays, and tokens of equal probability stay or go together. top_k <= 0 or >= V, top_p >= 1 and min_p = 0
    cut nothing. A row with NaN, +inf, or nothing but -inf gives an undefined number.

    logits are float32, top_k int32, the others float32, temperatures > 0. `interpret` is handed to Pallas.
    Raises ValueError for other types or shapes.
    """
    if temperature_S is None:
        temperature_S = jnp.ones(logits_SV.shape[:1], jnp.float32)
    wanted = {"top_k_S": (top_k_S, jnp.int32), "top_p_S": (top_p_S, jnp.float32), "min_p_S": (min_p_S, jnp.float32)}
    wanted["temperature_S"] = temperature_S, jnp.float32
    if logits_SV.ndim != 2 or logits_SV.dtype != jnp.float32:
        raise ValueError(f"logits_SV is {logits_SV.dtype}{list(logits_SV.shape)}; accepted is float32[S, V].")
    for name, (x_S, dtype) in wanted.items():
        if x_S.shape != logits_SV.shape[:1] or x_S.dtype != dtype:
            accepted = f"{jnp.dtype(dtype)}[{logits_SV.shape[0]}], one for each row of logits_SV"
            raise ValueError(f"{name} is {x_S.dtype}{list(x_S.shape)}; accepted is {accepted}.")
    module = choosing.require(_OP, _BACKENDS, backend, logits_SV)
    return module.least_logits(logits_SV, top_k_S, top_p_S, min_p_S, temperature_S, interpret=interpret)
