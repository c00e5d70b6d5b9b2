"""Bytes as bfloat16 in Triton kernels, by fewer instructions than its own conversions have. Knows no kernel.

A byte in the low half of a bfloat16 whose other bits are zero is that many times the least number that there is, also
where it reaches into the exponent. So one packed multiply-add makes any product with it, and a sum, rounded once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

LEAST = 2.0**-133
"""The least bfloat16 above zero."""
SHRUNK = 2.0**-23
"""What numbers of bytes are multiplied with, since one over `LEAST` is no bfloat16: sums have the reverse."""
SIGN = 128
"""How much more than an int8 its byte is here."""


def multiplied_bytes(bytes_X: jax.Array, factor: Any, added: Any, taken: int | None = None) -> jax.Array:
    """factor * byte * LEAST + added in bfloat16. Both are floats, or bfloat16 of any shape that spreads over that of
    the bytes. `taken`: bits of each that count, others being zero. Without it bytes are int8, and `SIGN` is added."""
    given, set_up, named = [bytes_X], list[str](), list[tuple[str, str]]()
    for name, x in (("f", factor), ("c", added)):
        if isinstance(x, jax.Array):
            named.append((f"${2 * len(given) + 1}", f"${2 * len(given) + 2}"))
            given.append(jnp.broadcast_to(x, bytes_X.shape))
        else:
            set_up.append(f".reg .b32 {name}; mov.b32 {name}, 0x{digits(x) * 2};")
            named.append((name, name))
    (first_factor, second_factor), (first_added, second_added) = named
    lines = [
        "{ .reg .b32 a, b;",
        *set_up,
        "mov.b32 a, $2;" if taken else "xor.b32 a, $2, 0x80808080;",
        "prmt.b32 b, a, 0, 0x4342;",
        "prmt.b32 a, a, 0, 0x4140;",
        *(f"and.b32 {name}, {name}, {taken * 0x00010001};" for name in "ab" if taken),
        f"fma.rn.bf16x2 $0, a, {first_factor}, {first_added};",
        f"fma.rn.bf16x2 $1, b, {second_factor}, {second_added}; }}",
    ]
    (out,) = plgpu.elementwise_inline_asm(
        "\n".join(lines),
        args=given,
        constraints="=r,=r,r" + ",r,r" * (len(given) - 1),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(bytes_X.shape, jnp.bfloat16)],
    )
    return out


def digits(number: float) -> str:
    """The bits of a bfloat16, in base 16."""
    return np.asarray(number, jnp.bfloat16).tobytes()[::-1].hex()
