"""Serving steps with numbers, as chains to time: one layer's attention over a cache of shuffled blocks.

Knows nothing of tests, nor of how anything is timed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import ServingStep
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
from pallas_kernels.shapes import ceil_div
from pallas_kernels.testing import layer_of
from pallas_kernels.timing import Chain


def attention_chain(step: ServingStep, backend: str, layer: Callable | None = None) -> Chain:
    """The state is (cache, q), and each call's outputs are the next one's queries.

    `layer` takes the place of the backend's own, with the arguments of `testing.layer_of`'s.
    """
    table_RM = block_table(step)
    own_layer, structs = layer_of(step.shape, backend, int(table_RM.max()) + 1, table_RM.shape[1])
    kv, q_TNH, k_TKH, v_TKH = random_arrays(structs[:4])
    start_R1 = np.cumsum([0] + [new for _, new in step.rows])
    where = [len(step.rows), start_R1, [sum(row) for row in step.rows], table_RM]
    sinks_N = jnp.zeros(step.shape.num_heads, jnp.float32)
    operands = (k_TKH, v_TKH, sinks_N, *(jnp.asarray(x, jnp.int32) for x in where))

    def call(state, *operands):
        kv, q_TNH = state
        out_TNH, kv = (layer or own_layer)(kv, q_TNH, *operands)
        return kv, out_TNH

    return Chain(call, (kv, q_TNH), operands)


def layer_with(backend: GpuBackend, step: ServingStep) -> Callable:
    """`testing.layer_of`'s function, with a backend that has no name."""
    shape = step.shape

    def layer(kv, q_TNH, k_TKH, v_TKH, sinks_N, *where):
        settings = {"num_tokens": shape.num_tokens, "block_size": shape.block_size, "window": shape.window}
        metadata = rpa.AttentionMetadata(*where, backend.make_plan(*where[1:], **settings))
        out_TNH, arrays, scales = backend.attention(
            q_TNH, k_TKH, v_TKH, kv.arrays, metadata, scale=shape.head_dim**-0.5, window=shape.window,
            soft_cap=shape.soft_cap, sinks_N=sinks_N if shape.sinks else None, scales=kv.scales,
        )  # fmt: skip
        return out_TNH, rpa.KVTensor(arrays, scales)

    return layer


def block_table(step: ServingStep) -> np.ndarray:
    """Shuffled blocks for every row, from 1 on: [R, M]."""
    needed = [ceil_div(sum(row), step.shape.block_size) for row in step.rows]
    table_RM = np.zeros((len(needed), max(needed)), np.int32)
    ids = np.random.default_rng(0).permutation(sum(needed)) + 1
    for row, begin in enumerate(np.cumsum([0, *needed[:-1]])):
        table_RM[row, : needed[row]] = ids[begin : begin + needed[row]]
    return table_RM


def random_arrays(structs: Any) -> Any:
    """A tree of arrays like `structs`: normal numbers, or small integers."""
    leaves, tree = jax.tree.flatten(structs)
    return tree.unflatten([_random(i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)])


def _random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    @jax.jit  # so that no wider array is ever whole
    def make(key):
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, -100, 100, dtype)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

    return make(jax.random.key(seed))
