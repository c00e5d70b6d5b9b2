"""Weights of 8 and 4 bits with scales, as products of few rows take them. Knows neither checkpoints nor backends."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.int4_matmul import GROUP, ZERO, unpack_values

BITS = {"int8": 8, "float8_e4m3fn": 8, "uint8": 4}
"""Type of the values -> bits that each has."""
SCALES = ("float32", "bfloat16")
PACKED_GROUP = GROUP
"""Inputs whose values of 4 bits lie in 16 bytes, in the order of `int4_matmul`, however many share a scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaledWeight:
    """A weight of F outputs and D inputs: `(values - zeros) * scales`, input d being in group d // (D / C).

    values: int8 or float8_e4m3fn [F, D], or uint8 [F, D / 2], two of 4 bits to a byte. With a gate and an up for each
    output [F, 2, ...], and so are the others. scales: float32 or bfloat16 [F, C]; C = 1 is a scale per output. zeros:
    [F, C] of the same types; None is 0, or `int4_matmul.ZERO` of 4 bits. `groups_first`: scales and zeros are [C, F].
    """

    values: Any
    scales: Any
    zeros: Any = None
    groups_first: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def bits(self) -> int:
        return BITS[str(self.dtype)]

    @property
    def is_packed(self) -> bool:
        return self.bits < 8

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight, as if each value were a number."""
        return (*self.values.shape[:-1], self.values.shape[-1] * (1 + self.is_packed))

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0 if self.groups_first else -1]


def check(weight: ScaledWeight) -> None:
    """Raises ValueError for what is no such weight."""
    values, scales = weight.values, weight.scales
    if str(values.dtype) not in BITS or values.ndim not in (2, 3):
        raise ValueError(f"values is {spelled(values)}; accepted are {', '.join(BITS)} of two or three axes.")
    D = weight.shape[-1]
    if weight.is_packed and D % PACKED_GROUP:
        raise ValueError(f"values is {spelled(values)}; accepted is a multiple of {PACKED_GROUP // 2} bytes an output.")
    if weight.zeros is not None and str(values.dtype) == "float8_e4m3fn":
        raise ValueError(f"zeros is {spelled(weight.zeros)} for values of float8_e4m3fn; accepted is None.")
    C, outputs = weight.num_groups if scales.ndim else 0, values.shape[:-1]
    wanted = (C, *outputs) if weight.groups_first else (*outputs, C)
    for name, x in (("scales", scales), ("zeros", weight.zeros)):
        if x is not None and (str(x.dtype) not in SCALES or x.shape != wanted or not C or D % C):
            shape = ["C", *outputs] if weight.groups_first else [*outputs, "C"]
            accepted = f"{' or '.join(SCALES)}{shape} where C divides {D} inputs, of scales and zeros alike"
            raise ValueError(f"{name} is {spelled(x)}; accepted is {accepted}.")


def dequantized(weight: ScaledWeight) -> jax.Array:
    """The weight in float32."""
    *outputs, D = weight.shape
    values = unpack_values(weight.values) if weight.is_packed else weight.values
    values = values.astype(jnp.float32).reshape(*outputs, weight.num_groups, -1)
    spread = lambda x: (jnp.moveaxis(x, 0, -1) if weight.groups_first else x).astype(jnp.float32)[..., None]
    if weight.zeros is not None:
        values -= spread(weight.zeros)
    elif weight.is_packed:
        values -= ZERO
    return (values * spread(weight.scales)).reshape(*outputs, D)


def spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
