"""What a user would call instead of our grouped products: `jax.lax.ragged_dot` with weights of 16 bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_bench.yardsticks import Yardsticks

from pallas_kernels.grouped_matmul import ExpertWeights
from pallas_kernels.timing import Chain, fed_back
from pallas_kernels.workloads import chain_of, operands_of

OP = "grouped_matmul"


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`. Ours in XLA is one where a kernel is the best."""
    weights = "" if case.weights == case.dtype else ", dequantised before"
    result: Yardsticks = {f"jax.lax.ragged_dot of {case.dtype}{weights}": lambda: ragged(case)}
    return result if platform == "cpu" else result | {"ours in XLA": lambda: chain_of(OP, case, "reference")}


def ragged(case: Any) -> Chain:
    x_TD, weights, size_E = operands_of(OP, case, "reference")
    weight_EDF = jax.jit(lambda weights: jnp.swapaxes(dequantize(weights), 1, 2).astype(x_TD.dtype))(weights)
    return fed_back(lambda x_TD, weight_EDF, size_E: lax.ragged_dot(x_TD, weight_EDF, size_E), x_TD, weight_EDF, size_E)


def dequantize(weights: ExpertWeights) -> jax.Array:
    """The weights [E, F, D], in float32 if they were quantised."""
    values_EFD, scale_ECF = weights.values_EFD, weights.scale_ECF
    if scale_ECF is None:
        return values_EFD
    (E, F, D), C = values_EFD.shape, scale_ECF.shape[1]
    values_EFC = values_EFD.astype(jnp.float32).reshape(E, F, C, D // C)
    return (values_EFC * jnp.swapaxes(scale_ECF, 1, 2)[..., None]).reshape(E, F, D)
