"""Serving steps with numbers, as chains to time: one layer's attention over a cache of shuffled blocks.

Knows nothing of tests, nor of how anything is timed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import ServingStep
from pallas_kernels.ragged_paged_attention.gpu import GpuBackend
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES, SharedWork, fill_spans
from pallas_kernels.shapes import ceil_div
from pallas_kernels.testing import layer_of
from pallas_kernels.timing import Chain, touched

NUM_LAYERS = 8  # of a step: they share lists of work, whose many small kernels would hide a layer's own time


def attention_chain(step: ServingStep, backend: str, layer: Callable | None = None) -> Chain:
    """Layers of steps, over one cache; the state is (cache, q, out).

    `layer` takes the place of the backend's own, with the arguments of `testing.layer_of`'s.
    """
    table_RM = block_table(step)
    own_layer, structs = layer_of(step.shape, backend, int(table_RM.max()) + 1, table_RM.shape[1])
    kv, q_TNH, k_TKH, v_TKH = filled_arrays(structs[:4])
    start_R1 = np.cumsum([0] + [new for _, new in step.rows])
    where = [len(step.rows), start_R1, [sum(row) for row in step.rows], table_RM]
    if step.shape.shares:
        work = rpa.shared_work(backend, step.shape.num_tokens, step.shape.block_size)
        where.append(spans_in_common(step.rows, step.in_common, work))
    sinks_N = jnp.zeros(step.shape.num_heads, jnp.float32)
    operands = (k_TKH, v_TKH, sinks_N, *(jnp.asarray(x, jnp.int32) for x in where))

    one_layer = jax.jit(layer or own_layer)  # traced once

    def call(state, *operands):
        kv, q_TNH, out_TNH = state
        q_TNH = touched(q_TNH, out_TNH)
        out_TNH = q_TNH
        for _ in range(NUM_LAYERS):
            out_TNH, kv = one_layer(kv, out_TNH, *operands)
        return kv, q_TNH, out_TNH

    return Chain(call, (kv, q_TNH, jnp.zeros(q_TNH.shape, q_TNH.dtype)), operands, NUM_LAYERS)


def layer_with(backend: GpuBackend, step: ServingStep) -> Callable:
    """`testing.layer_of`'s function, with a backend that has no name."""
    shape = step.shape

    def layer(kv, q_TNH, k_TKH, v_TKH, sinks_N, *where):
        settings = {"num_tokens": shape.num_tokens, "block_size": shape.block_size, "window": shape.window}
        plan = backend.make_plan(*where[1:], **settings)
        metadata = rpa.AttentionMetadata(*where, plan, decodes_only=shape.decodes_only)
        out_TNH, arrays, scales = backend.attention(
            q_TNH,
            k_TKH,
            v_TKH,
            kv.arrays,
            metadata,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks_N=sinks_N if shape.sinks else None,
            scales=kv.scales,
        )
        return out_TNH, rpa.KVTensor(arrays, scales)

    return layer


def block_table(step: ServingStep) -> np.ndarray:
    """Shuffled blocks for every row, from 1 on, where attention's null block is 0: [R, M]."""
    table_RM = shuffled_blocks([sum(row) for row in step.rows], step.shape.block_size, first_id=1)
    num_common = step.in_common // step.shape.block_size
    table_RM[:, :num_common] = table_RM[0, :num_common]
    return table_RM


def spans_in_common(rows: Sequence[tuple[int, int]], in_common: int, work: SharedWork | None) -> np.ndarray:
    """What attention is told of `rows`, (cached, new) tokens each, whose first `in_common` slots lie in the same
    blocks: int32 [6, R], zeros where a backend does not share in such a step (`work` is None)."""
    shared_6R = np.zeros((NUM_LINES, len(rows)), np.int32)
    if work is not None:
        units = [0] + [in_common // work.unit] * (len(rows) - 1)
        fill_spans(shared_6R, range(len(rows)), units, np.array([new for _, new in rows]), work)
    return shared_6R


def shuffled_blocks(lengths: list[int], block_size: int, first_id: int = 0) -> np.ndarray:
    """Blocks for contexts of these lengths, from `first_id` on, none twice: [R, M], zeros behind a row's last."""
    needed = [ceil_div(length, block_size) for length in lengths]
    table_RM = np.zeros((len(needed), max(needed)), np.int32)
    ids = first_id + np.random.default_rng(0).permutation(sum(needed))
    for row, begin in enumerate(np.cumsum([0, *needed[:-1]])):
        table_RM[row, : needed[row]] = ids[begin : begin + needed[row]]
    return table_RM


def filled_arrays(structs: Any) -> Any:
    """A tree of arrays like `structs`, with numbers between -2 and 2, or integers between -128 and 127."""
    return jax.tree.map(lambda struct: _filled(struct.shape, struct.dtype), structs)


@functools.partial(jax.jit, static_argnums=(0, 1))  # one program, so that nothing wider than `dtype` is ever whole
def _filled(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    scattered = (index * jnp.uint32(2654435761)) >> 24  # Knuth's multiplicative hash
    numbers = scattered.astype(jnp.int32).reshape(shape) - 128
    return numbers.astype(dtype) if jnp.issubdtype(dtype, jnp.integer) else (numbers / 64).astype(dtype)
