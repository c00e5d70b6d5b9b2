"""What a user would call instead of our attention: JAX's own kernels, and PyTorch's.

They read a cache that is already there, and write no new keys and values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench.yardsticks import Yardsticks, installed_torch, torch_seconds

from pallas_kernels.ragged_paged_attention.cases import ServingStep
from pallas_kernels.serving import block_table, filled_arrays
from pallas_kernels.timing import Chain, fed_back


def yardsticks(step: ServingStep, platform: str) -> Yardsticks:
    """See `yardsticks.Yardsticks`."""
    result: Yardsticks = {"dense, jax.nn.dot_product_attention": lambda: dense_jax(step, "xla")}
    if platform == "tpu":
        result["jax.experimental.pallas.ops.tpu.ragged_paged_attention"] = lambda: paged_jax_tpu(step)
    if platform == "gpu":
        result["dense, the same through cuDNN"] = lambda: dense_jax(step, "cudnn")
        result["jax.experimental.pallas.ops.gpu.paged_attention"] = lambda: paged_jax_gpu(step)
        result["dense, torch SDPA"] = lambda: dense_torch(step, "SDPA")
        result["dense, torch FlexAttention"] = lambda: dense_torch(step, "FlexAttention")
    return result


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
            q_RQNH,
            k_RPKH,
            v_RPKH,
            is_causal=not step.is_decode,
            local_window_size=window,
            implementation=implementation,
        )

    return fed_back(attend, q_RQNH, *kv)


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
    return fed_back(paged_attention, q_RNH, *kv, jnp.asarray(table_RM), lengths_R)


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
            q_TNH,
            kv,
            *where,
            jnp.asarray([len(step.rows)], jnp.int32),
            sm_scale=shape.head_dim**-0.5,
            sliding_window=shape.window,
            soft_cap=shape.soft_cap,
        )

    return fed_back(attend, q_TNH, kv, *where)


def dense_torch(step: ServingStep, name: str) -> Callable[[], float] | None:
    torch = installed_torch()
    if torch is None or not is_rectangular(step) or step.shape.window:
        return None
    (cached, new), shape = step.rows[0], step.shape
    sizes = ((shape.num_heads, new), *[(shape.num_kv_heads, cached + new)] * 2)
    q, k, v = (
        torch.randn((len(step.rows), heads, tokens, shape.head_dim), dtype=getattr(torch, shape.dtype), device="cuda")
        for heads, tokens in sizes
    )
    attend = torch_function(torch, name, causal=not step.is_decode, num_tokens=new)
    return lambda: torch_seconds(torch, lambda: attend(q, k, v))


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
