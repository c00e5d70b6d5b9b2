"""What a user would call instead of products with quantised weights: those with weights of 16 bits, or plain ones of
8 bits without any scale, in XLA and in PyTorch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from kernel_bench.yardsticks import Yardsticks, installed_torch, torch_seconds

from pallas_kernels.quantized_matmul.reference import dequantize
from pallas_kernels.serving import filled_arrays
from pallas_kernels.timing import Chain, fed_back
from pallas_kernels.workloads import chain_of, operands_of

OP = "quantized_matmul"
FEWEST_ROWS = 17  # of torch._int_mm


def yardsticks(case: Any, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`. Ours in XLA is one where a kernel is the best."""
    result: Yardsticks = {f"dequantised before, jnp.dot of {case.dtype}": lambda: unquantized(case)}
    if case.activations is not None:
        result[f"jnp.dot of {case.activations}, no scales"] = lambda: unscaled(case)
    if platform != "cpu" and case.activations is None:
        result["ours in XLA"] = lambda: chain_of(OP, case, "reference")
    if platform == "gpu":
        result[f"dequantised before, torch product of {case.dtype}"] = lambda: unquantized_torch(case)
        result["torch product of 8 bits, no scales"] = lambda: unscaled_torch(case)
    return result


def unquantized(case: Any) -> Chain:
    x_TD, weight = operands_of(OP, case, "reference")
    return fed_back(times_transposed, x_TD, jax.jit(lambda weight: dequantize(weight).astype(x_TD.dtype))(weight))


def unscaled(case: Any) -> Chain:
    dims = ((case.num_tokens, case.num_inputs), (case.num_outputs, case.num_inputs))
    return fed_back(
        times_transposed, *filled_arrays(tuple(jax.ShapeDtypeStruct(x, jnp.dtype(case.activations)) for x in dims))
    )


def times_transposed(x_TD: jax.Array, y_FD: jax.Array) -> jax.Array:
    """Integers are summed in int32; floats come out in x's type, those of 8 bits in bfloat16."""
    sums = jnp.int32 if jnp.issubdtype(x_TD.dtype, jnp.integer) else jnp.float32
    out_TF = lax.dot_general(x_TD, y_FD, (((1,), (1,)), ((), ())), preferred_element_type=sums)
    if sums == jnp.int32:
        return out_TF
    return out_TF.astype(jnp.bfloat16 if x_TD.dtype.itemsize == 1 else x_TD.dtype)


def unquantized_torch(case: Any) -> Callable[[], float] | None:
    torch = installed_torch()
    if torch is None:
        return None
    dims = ((case.num_tokens, case.num_inputs), (case.num_outputs, case.num_inputs))
    x_TD, y_FD = (torch.randn(x, dtype=getattr(torch, case.dtype), device="cuda") for x in dims)
    return lambda: torch_seconds(torch, lambda: x_TD @ y_FD.T)


def unscaled_torch(case: Any) -> Callable[[], float] | None:
    torch = installed_torch()
    if torch is None or case.activations is None or case.num_tokens < FEWEST_ROWS:
        return None
    dims = ((case.num_tokens, case.num_inputs), (case.num_outputs, case.num_inputs))
    if case.activations == "int8":
        x_TD, y_FD = (torch.randint(-127, 128, x, dtype=torch.int8, device="cuda") for x in dims)
        return lambda: torch_seconds(torch, lambda: torch._int_mm(x_TD, y_FD.T))
    x_TD, y_FD = (torch.randn(x, device="cuda").to(getattr(torch, case.activations)) for x in dims)
    one = torch.ones((), device="cuda")
    scales = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    return lambda: torch_seconds(torch, lambda: torch._scaled_mm(x_TD, y_FD.T, **scales))
