"""What a user would call instead of our attention, for `bench_kernel.py`: JAX's own kernels, and PyTorch's.

Each yardstick is a function of a step that gives something to time, or None where it cannot do the step. They read
a cache that is already there, and write no new keys and values.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.cases import ServingStep
from pallas_kernels.serving import block_table, filled_arrays
from pallas_kernels.timing import Chain, seconds_per_call


def yardsticks(platform: str) -> dict[str, Callable[[ServingStep], Callable[[], float] | None]]:
    """By name: a function from a step to what measures its seconds."""
    chains = {"dense, jax.nn.dot_product_attention": lambda step: dense_jax(step, "xla")}
    if platform == "gpu":
        chains["dense, the same through cuDNN"] = lambda step: dense_jax(step, "cudnn")
        chains["jax.experimental.pallas.ops.gpu.paged_attention"] = paged_jax_gpu
    if platform == "tpu":
        chains["jax.experimental.pallas.ops.tpu.ragged_paged_attention"] = paged_jax_tpu
    result = {name: measuring(chain) for name, chain in chains.items()}
    if platform == "gpu":
        result |= {f"dense, torch {name}": torch_yardstick(name) for name in ("SDPA", "FlexAttention")}
    return result


def measuring(make: Callable[[ServingStep], Chain | None]) -> Callable[[ServingStep], Callable[[], float] | None]:
    def measure(step: ServingStep) -> Callable[[], float] | None:
        chain = make(step)
        return None if chain is None else lambda: seconds_per_call(chain)

    return measure


def is_rectangular(step: ServingStep) -> bool:
    """Whether a dense cache can hold the step without padding, with a plain causal mask."""
    cached, new = step.rows[0]
    plain = step.shape.kv_dtype == step.shape.dtype and step.shape.soft_cap is None and not step.shape.sinks
    return plain and len(set(step.rows)) == 1 and (cached == 0 or new == 1)


def dense_arrays(step: ServingStep) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [R, Q, N, H], k and v [R, P, K, H]."""
    (cached, new), shape = step.rows[0], step.shape
    q_shape, kv_shape = (len(step.rows), new, shape.num_heads), (len(step.rows), cached + new, shape.num_kv_heads)
    shapes = [(*dims, shape.head_dim) for dims in (q_shape, kv_shape, kv_shape)]
    return filled_arrays(tuple(jax.ShapeDtypeStruct(dims, jnp.dtype(shape.dtype)) for dims in shapes))


def dense_jax(step: ServingStep, implementation: str) -> Chain | None:
    if not is_rectangular(step) or (step.is_decode and step.shape.window):
        return None
    q_RQNH, *kv = dense_arrays(step)
    window = None if step.shape.window is None else (step.shape.window - 1, 0)

    def attend(q_RQNH, k_RPKH, v_RPKH):
        return jax.nn.dot_product_attention(
            q_RQNH, k_RPKH, v_RPKH, is_causal=not step.is_decode, local_window_size=window,
            implementation=implementation,
        )  # fmt: skip

    return Chain(attend, q_RQNH, tuple(kv))


def paged_jax_gpu(step: ServingStep) -> Chain | None:
    shape = step.shape
    if not step.is_decode or shape.window or shape.sinks or shape.kv_dtype != shape.dtype:
        return None
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    table_RM = block_table(step)
    pages = (shape.num_kv_heads, int(table_RM.max()) + 1, shape.block_size, shape.head_dim)
    dims = ((len(step.rows), shape.num_heads, shape.head_dim), pages, pages)
    q_RNH, *kv = filled_arrays(tuple(jax.ShapeDtypeStruct(x, jnp.dtype(shape.dtype)) for x in dims))
    lengths_R = jnp.asarray([sum(row) for row in step.rows], jnp.int32)
    return Chain(paged_attention, q_RNH, (*kv, jnp.asarray(table_RM), lengths_R))


def paged_jax_tpu(step: ServingStep) -> Chain | None:
    shape = step.shape
    if shape.sinks or shape.kv_dtype != shape.dtype:
        return None
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    table_RM = block_table(step)
    pages = (int(table_RM.max()) + 1, shape.block_size, 2 * shape.num_kv_heads, shape.head_dim)
    dims = ((shape.num_tokens, shape.num_heads, shape.head_dim), pages)
    q_TNH, kv = filled_arrays(tuple(jax.ShapeDtypeStruct(x, jnp.dtype(shape.dtype)) for x in dims))
    start_R1 = jnp.cumsum(jnp.asarray([0] + [new for _, new in step.rows], jnp.int32))
    where = (jnp.asarray([sum(row) for row in step.rows], jnp.int32), jnp.asarray(table_RM), start_R1)

    def attend(q_TNH, kv, *where):
        return ragged_paged_attention(
            q_TNH, kv, *where, jnp.asarray([len(step.rows)], jnp.int32), sm_scale=shape.head_dim**-0.5,
            sliding_window=shape.window, soft_cap=shape.soft_cap,
        )  # fmt: skip

    return Chain(attend, q_TNH, (kv, *where))


def torch_yardstick(name: str) -> Callable[[ServingStep], Callable[[], float] | None]:
    def measure(step: ServingStep) -> Callable[[], float] | None:
        try:
            import torch
        except ImportError:
            return None
        if not is_rectangular(step) or step.shape.window or not torch.cuda.is_available():
            return None
        return lambda: torch_seconds(torch, name, step)

    return measure


def torch_seconds(torch: Any, name: str, step: ServingStep) -> float:
    """The best of five runs of twenty calls."""
    (cached, new), shape = step.rows[0], step.shape
    sizes = ((shape.num_heads, new), *[(shape.num_kv_heads, cached + new)] * 2)
    q, k, v = (
        torch.randn((len(step.rows), heads, tokens, shape.head_dim), dtype=getattr(torch, shape.dtype), device="cuda")
        for heads, tokens in sizes
    )
    attend = torch_function(torch, name, causal=not step.is_decode, num_tokens=new)
    attend(q, k, v)
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            attend(q, k, v)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 20)
    return best


def torch_function(torch: Any, name: str, causal: bool, num_tokens: int) -> Callable:
    if name == "SDPA":
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda q, k, v: attend(q, k, v, is_causal=causal, enable_gqa=True)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, num_tokens, num_tokens)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)
