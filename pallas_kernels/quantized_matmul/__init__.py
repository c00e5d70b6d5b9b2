"""Products with quantised weights: int8, float8, int4 and float4, per output channel or per group of inputs.

Validates, picks a backend, and says why others were refused. `reference` is XLA, and the best there is for one scale
per output channel: compiled for v5e, TPU7x and an H100, XLA converts such weights on their way into the product and
writes no copy of them; products of int8 with int8 and of float8 with float8 are its own as well. For group-wise
scales it writes the dequantised weights to memory first (117 MB for a 59 MB int8 weight of 14336 x 4096, on all
three), which `tpu` and `gpu` avoid: they read the quantised weights and nothing else. Not measured.

This module knows nothing of checkpoints. Letters: T tokens, D inputs, F outputs, C groups of inputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing
from pallas_kernels.int4_matmul import GROUP as PACKED_GROUP

_OP, _BACKENDS = "quantized_matmul", ("reference", "tpu", "gpu")
_WEIGHTS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "float4_e2m1fn")
PACKED = "uint8"
_SCALES = ("float32", "bfloat16", "float8_e4m3fn")
_ACTIVATIONS = ("int8", "float8_e4m3fn")
_FLOATS = ("bfloat16", "float16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight of F outputs and D inputs: `(values_FD - zero_CF) * scale_CF`, input d being in group d // (D / C).

    values_FD: int8, float8_e4m3fn, float8_e5m2, int4 or float4_e2m1fn. scale_CF: float32, bfloat16 or float8_e4m3fn;
    C = 1 is a scale per output channel. zero_CF: float32 or None, which is zero. A scale of all of a weight, as NVFP4
    has it, belongs to the product: multiply that. Or values are uint8 [F, D / 2], two of 4 bits to a byte in the order
    of `int4_matmul`, and without zeros `int4_matmul.ZERO` is.
    """

    values_FD: Any
    scale_CF: Any
    zero_CF: Any = None

    @property
    def is_packed(self) -> bool:
        return str(self.values_FD.dtype) == PACKED

    @property
    def shape(self) -> tuple[int, int]:
        """(F, D)."""
        return self.values_FD.shape[0], self.values_FD.shape[1] * (1 + self.is_packed)


def backends(platform: str, x_TD: Any = None, weight: QuantizedWeight | None = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if weight is None else [x_TD, weight]))


def choose_backend(name: str, platform: str, x_TD: Any = None, weight: QuantizedWeight | None = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if weight is None else [x_TD, weight]))


def quantized_matmul(
    x_TD: jax.Array, weight: QuantizedWeight, *, activations: Any = None, backend: str, interpret: Any = False
) -> jax.Array:
    """x times the transposed weight, out_TF in x's type, accumulated in float32.

    `activations` may be int8 or float8_e4m3fn: each token is then quantised to it, with a scale of its own, and the
    product is one of equal types, int8 being accumulated in int32; the weight has that type, one group and no zero.
    `interpret` is handed to Pallas. Raises ValueError for other operands.
    """
    _check_weight(weight)
    if x_TD.ndim != 2 or x_TD.shape[1] != weight.shape[1] or str(x_TD.dtype) not in _FLOATS:
        accepted = f"{' or '.join(_FLOATS)}[T, {weight.shape[1]}], for this weight"
        raise ValueError(f"x_TD is {_spelled(x_TD)}; accepted is {accepted}.")
    if activations is not None:
        _check_activations(jnp.dtype(activations), weight, backend)
    module = choosing.require(_OP, _BACKENDS, backend, x_TD, weight)
    return module.quantized_matmul(x_TD, weight, activations=activations, interpret=interpret)


def quantize(weight_FD: jax.Array, dtype: Any, num_groups: int = 1) -> QuantizedWeight:
    """The weight, rounded to nearest, each group's largest magnitude becoming `dtype`'s largest.

    Raises ValueError where D is no multiple of `num_groups`, or for a type that weights cannot have.
    """
    (F, D), C = weight_FD.shape, num_groups
    if D % C or jnp.dtype(dtype).name not in _WEIGHTS:
        accepted = f"{', '.join(_WEIGHTS)} and numbers of groups that divide {D} inputs"
        raise ValueError(f"dtype is {jnp.dtype(dtype)} and num_groups {C}; accepted are {accepted}.")
    values_FC, scale_FC = quantize_last_axis(weight_FD.reshape(F, C, D // C), dtype)
    return QuantizedWeight(values_FC.reshape(F, D), scale_FC.T)


def quantize_last_axis(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """(x in `dtype`, float32 scales with one axis less); zeros get a scale of one."""
    integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integer else jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(top > 0, top / largest, 1.0)
    scaled = jnp.clip(x / scale[..., None], -largest, largest)
    return (jnp.round(scaled) if integer else scaled).astype(dtype), scale


def _check_weight(weight: QuantizedWeight) -> None:
    values_FD, scale_CF, zero_CF = weight.values_FD, weight.scale_CF, weight.zero_CF
    if values_FD.ndim != 2 or str(values_FD.dtype) not in (*_WEIGHTS, PACKED):
        accepted = f"{' or '.join(_WEIGHTS)}[F, D], or {PACKED}[F, D / 2]"
        raise ValueError(f"values_FD is {_spelled(values_FD)}; accepted is {accepted}.")
    F, D = weight.shape
    if weight.is_packed and D % PACKED_GROUP:
        accepted = f"a multiple of {PACKED_GROUP // 2} bytes an output"
        raise ValueError(f"values_FD is {_spelled(values_FD)}; accepted is {accepted}.")
    for name, x_CF, types in (("scale_CF", scale_CF, _SCALES), ("zero_CF", zero_CF, _SCALES[:1])):
        if x_CF is None:
            continue
        if x_CF.ndim != 2 or x_CF.shape[1] != F or D % x_CF.shape[0] or str(x_CF.dtype) not in types:
            accepted = f"{' or '.join(types)}[C, {F}] where C divides {D} inputs"
            raise ValueError(f"{name} is {_spelled(x_CF)}; accepted is {accepted}.")
    if zero_CF is not None and zero_CF.shape != scale_CF.shape:
        raise ValueError(f"zero_CF is {_spelled(zero_CF)}, scale_CF {_spelled(scale_CF)}; both need the same groups.")


def _check_activations(dtype: Any, weight: QuantizedWeight, backend: str) -> None:
    if dtype.name not in _ACTIVATIONS or dtype != weight.values_FD.dtype:
        accepted = f"None or the weight's type, {weight.values_FD.dtype}, if it is {' or '.join(_ACTIVATIONS)}"
        raise ValueError(f"activations is {dtype}; accepted is {accepted}.")
    if weight.scale_CF.shape[0] != 1 or weight.zero_CF is not None:
        groups = f"{weight.scale_CF.shape[0]} groups{'' if weight.zero_CF is None else ' and zeros'}"
        raise ValueError(f"activations is {dtype} for a weight of {groups}; accepted is one group without zeros.")
    if backend != "reference":
        raise ValueError(
            f"activations is {dtype} with backend {backend!r}; accepted is 'reference', XLA's own product."
        )


def _spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
