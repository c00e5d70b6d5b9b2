"""Each token times the weight of its own group: the experts of a mixture, unquantised, int8, float8, int4 or float4.

Validates, picks a backend, and says why others were refused. Tokens are sorted by expert, and work follows those that
exist: every backend walks over a list of tiles of tokens. `jax.lax.ragged_dot` is no good: compiled for an H100, and
for TPUs by libtpu 0.0.52, it multiplies every token with every expert (128 times the work of 128 experts; 0.0.50 copied
all weights first, 0.0.51 did neither), and on a CPU core `reference` is 12 to 40 times faster (2048 down to 8 tokens
per 32 experts). Quantised weights enter it as a dequantised copy of all experts, or not at all (int4); the kernels
convert them on chip. Not measured on accelerators.

This module knows nothing of routing. Letters: T tokens, E experts, D inputs, F outputs, C groups of inputs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import backends as choosing
from pallas_kernels.grouped_matmul.gradients import with_gradients

_OP, _BACKENDS = "grouped_matmul", ("reference", "tpu", "gpu", "cpu")
_QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "float4_e2m1fn")
_SCALES = ("float32", "bfloat16")
_FLOATS = ("bfloat16", "float16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """A weight of F outputs and D inputs for each of E experts: `values_EFD`, or `(values_EFD - zero_ECF) * scale_ECF`
    if they are quantised.

    values_EFD: a float type without scales; int8, float8_e4m3fn, float8_e5m2, int4 or float4_e2m1fn with them.
    scale_ECF: float32 or bfloat16, zero_ECF: float32, input d of an expert being in group d // (D / C); C = 1 is a
    scale per output channel. Without zero_ECF it is zero.
    """

    values_EFD: Any
    scale_ECF: Any = None
    zero_ECF: Any = None


def backends(platform: str, x_TD: Any = None, weights: ExpertWeights | None = None) -> dict[str, str | None]:
    """Every backend's name, with the reason why it cannot run on `platform`, or cannot take the operands, or None."""
    return choosing.refusals(_OP, _BACKENDS, platform, *([] if weights is None else [x_TD, weights]))


def choose_backend(name: str, platform: str, x_TD: Any = None, weights: ExpertWeights | None = None) -> str:
    """The backend called `name`, or for "auto" the best one. Raises ValueError if it cannot run there."""
    return choosing.choose(_OP, _BACKENDS, name, platform, *([] if weights is None else [x_TD, weights]))


def grouped_matmul(
    x_TD: jax.Array, weights: ExpertWeights, group_sizes_E: jax.Array, *, backend: str, interpret: Any = False
) -> jax.Array:
    """out_TF in x's type, accumulated in float32: the first `group_sizes[0]` tokens times expert 0, and so on.

    Sizes are int32 and add up to T at most; zeros for the tokens beyond. `interpret` is handed to Pallas. It can be
    differentiated by tokens and by weights of a float type. Raises ValueError for other operands.
    """
    _check_weights(weights)
    E, _, D = weights.values_EFD.shape
    if x_TD.ndim != 2 or x_TD.shape[1] != D or str(x_TD.dtype) not in _FLOATS:
        raise ValueError(f"x_TD is {_spelled(x_TD)}; accepted is {' or '.join(_FLOATS)}[T, {D}], for these weights.")
    if group_sizes_E.shape != (E,) or group_sizes_E.dtype != jnp.int32:
        raise ValueError(f"group_sizes_E is {_spelled(group_sizes_E)}; accepted is int32[{E}], one for each expert.")
    module = choosing.require(_OP, _BACKENDS, backend, x_TD, weights)
    if weights.scale_ECF is not None:
        return module.grouped_matmul(x_TD, weights, group_sizes_E, interpret=interpret)

    def multiply(x_TD: jax.Array, values_EFD: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
        weights = ExpertWeights(values_EFD)
        takes = module.cannot_take(x_TD, weights) is None  # a gradient has the shapes the other way round
        chosen = module if takes else choosing.require(_OP, _BACKENDS, "reference")
        return chosen.grouped_matmul(x_TD, weights, group_sizes_E, interpret=interpret)

    return with_gradients(multiply, x_TD, weights.values_EFD, group_sizes_E)


def _check_weights(weights: ExpertWeights) -> None:
    values_EFD, scale_ECF = weights.values_EFD, weights.scale_ECF
    types = _FLOATS if scale_ECF is None else _QUANTIZED
    if values_EFD.ndim != 3 or str(values_EFD.dtype) not in types:
        scales = "without scales" if scale_ECF is None else "with scales"
        raise ValueError(f"values_EFD is {_spelled(values_EFD)}; accepted is {' or '.join(types)}[E, F, D] {scales}.")
    E, F, D = values_EFD.shape
    if scale_ECF is None:
        if weights.zero_ECF is not None:
            raise ValueError(f"zero_ECF is {_spelled(weights.zero_ECF)} without scales; accepted is None.")
        return
    fits = scale_ECF.ndim == 3 and (scale_ECF.shape[0], scale_ECF.shape[2]) == (E, F) and D % scale_ECF.shape[1] == 0
    if not fits or str(scale_ECF.dtype) not in _SCALES:
        accepted = f"{' or '.join(_SCALES)}[{E}, C, {F}] where C divides {D} inputs"
        raise ValueError(f"scale_ECF is {_spelled(scale_ECF)}; accepted is {accepted}.")
    zero_ECF = weights.zero_ECF
    if zero_ECF is not None and (zero_ECF.shape != scale_ECF.shape or zero_ECF.dtype != jnp.float32):
        raise ValueError(f"zero_ECF is {_spelled(zero_ECF)}; accepted is float32{list(scale_ECF.shape)}, as scale_ECF.")


def _spelled(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
