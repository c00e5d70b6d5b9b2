"""What low-rank adapters (LoRA, arXiv 2106.09685) add to a product, each token's own of many: y += (x A) B.

Validates, picks a backend, and says why others were refused. `reference` multiplies each token with the ranks of all
slots, and masks those of others between the two products: as good as any where slots and ranks are few, since XLA's
products of them cost their bytes. The kernels follow each token's slot.

This module knows no layers and no adapters. Letters: T tokens, S slots, r ranks, I inputs, O outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing

_OP, _BACKENDS = "lora_matmul", ("reference", "cpu", "gpu")
DTYPES = ("bfloat16", "float16", "float32")
MOST_RANKS = 1024
"""For which `cpu` has room on the stack."""


def backends(platform: str, x_TI: Any = None, a_SrI: Any = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if a_SrI is None else [x_TI, a_SrI]))


def choose_backend(name: str, platform: str, x_TI: Any = None, a_SrI: Any = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if a_SrI is None else [x_TI, a_SrI]))


def lora_matmul(
    x_TI: jax.Array,
    a_SrI: jax.Array,
    b_SrO: jax.Array,
    slot_T: jax.Array,
    base_TO: jax.Array,
    *,
    dtype: Any,
    backend: str,
    interpret: Any = False,
) -> jax.Array:
    """base + (x A) B [T, O] in `dtype`, A and B being those of each token's slot; `slot_T` is int32, and -1 for tokens
    of none, which are as they were. Summed in float32; x, A and B are of one type. `interpret` is handed to Pallas.

    Raises ValueError for other operands.
    """
    T, I = x_TI.shape
    S, r, O = b_SrO.shape
    for name, x, shape, types in (
        ("x_TI", x_TI, (T, I), DTYPES),
        ("a_SrI", a_SrI, (S, r, I), (str(x_TI.dtype),)),
        ("b_SrO", b_SrO, (S, r, O), (str(x_TI.dtype),)),
        ("slot_T", slot_T, (T,), ("int32",)),
        ("base_TO", base_TO, (T, O), DTYPES),
    ):
        if x.shape != shape or str(x.dtype) not in types:
            raise ValueError(f"{name} is {x.dtype}{list(x.shape)}; accepted is {' or '.join(types)}{list(shape)}.")
    module = choosing.require(_OP, _BACKENDS, backend, x_TI, a_SrI)
    return module.lora_matmul(x_TI, a_SrI, b_SrO, slot_T, base_TO, jnp.dtype(dtype), interpret=interpret)
