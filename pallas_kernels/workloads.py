"""Every op's cases with numbers: operands that the op may be called with, and chains of calls to time.

Numbers are arbitrary, indices and sizes are the case's. Attention over keys and values per head has its own,
`serving.attention_chain`. Knows nothing of how anything is timed.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.programs import program_of
from pallas_kernels.serving import filled_arrays, shuffled_blocks
from pallas_kernels.timing import Chain, fed_back, touched


def choose_backend(op: str, case: Any, name: str, platform: str) -> str:
    """The backend called `name`, or for "auto" the best one that runs on `platform` and takes the case.

    Raises ValueError where the named one cannot.
    """
    module = importlib.import_module(f"pallas_kernels.{op}")
    if name == "auto":
        runs = [backend for backend, reason in module.backends(platform).items() if reason is None]
        return [backend for backend in runs if program_of(op, case, backend) is not None][-1]
    chosen = module.choose_backend(name, platform)
    if program_of(op, case, chosen) is None:
        raise ValueError(f"{op} backend {name!r} cannot take the case {case.name!r}. Use 'auto'.")
    return chosen


def operands_of(op: str, case: Any, backend: str) -> tuple[Any, ...]:
    """What `program_of` says, filled. Raises ValueError where the backend cannot take the case."""
    program = program_of(op, case, backend)
    if program is None:
        raise ValueError(f"{op} backend {backend!r} cannot take the case {case.name!r}.")
    return _FILL[op](case, program.args)


def chain_of(op: str, case: Any, backend: str) -> Chain:
    """Calls of the op, one after the other, each on what the last one left."""
    operands = operands_of(op, case, backend)
    function = program_of(op, case, backend).function
    if op == "mla_paged_attention":
        return latent_chain(function, operands)
    return fed_back(function, *operands)


def latent_chain(function: Callable, operands: tuple[Any, ...]) -> Chain:
    """The state is (cache, q, out)."""
    cache, q_TNC, *others = operands

    def call(state, *others):
        cache, q_TNC, out_TNC = state
        q_TNC = touched(q_TNC, out_TNC)
        out_TNC, cache = function(cache, q_TNC, *others)
        return cache, q_TNC, out_TNC

    return Chain(call, (cache, q_TNC, jnp.zeros(q_TNC.shape, q_TNC.dtype)), tuple(others))


def _masks(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Logits as models have them: with few distinct values, many would tie with the k-th."""
    logits_SV = 4 * jax.random.normal(jax.random.key(0), structs[0].shape)
    limits = (jnp.asarray(x, struct.dtype) for x, struct in zip(zip(*case.limits), structs[1:]))
    return logits_SV, *limits


def _largest(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (4 * jax.random.normal(jax.random.key(0), structs[0].shape),)


def _quantized(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    return filled_arrays(structs)


def _grouped(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    return *filled_arrays(structs[:2]), jnp.asarray(case.sizes, jnp.int32)


def _adapters(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    x_TI, a_SrI, b_SrO, _, base_TO = structs
    x_TI, a_SrI, b_SrO, base_TO = filled_arrays((x_TI, a_SrI, b_SrO, base_TO))
    return x_TI, a_SrI, b_SrO, jnp.asarray(case.slots, jnp.int32), base_TO


def _latent(case: Any, structs: tuple[Any, ...]) -> tuple[Any, ...]:
    lengths = [sum(row) for row in case.rows]
    where = (np.cumsum([0] + [new for _, new in case.rows]), lengths, shuffled_blocks(lengths, case.block_size))
    return *filled_arrays(structs[:5]), *(jnp.asarray(x, jnp.int32) for x in where)


_FILL = {
    "top_k_top_p": _masks,
    "top_k": _largest,
    "quantized_matmul": _quantized,
    "grouped_matmul": _grouped,
    "lora_matmul": _adapters,
    "mla_paged_attention": _latent,
}
