"""The TPU kernels go through the real compiler for v5e, v6e and TPU7x, within the VMEM that was estimated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels import tpu_targets
from pallas_kernels.ragged_paged_attention.cases import CASES, Case
from pallas_kernels.ragged_paged_attention.tpu import tiles
from pallas_kernels.tpu_targets import TARGETS, compile_for, vmem_of_kernels

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not())),
]

CASE = {case.name: case for case in CASES}
QUICK = ("head_dim 64, block_size 32", "head_dim 128", "head_dim 256, multi-query", "window, soft cap and sinks")
KERNELS = {"paged_attention_write", "paged_attention_decode", "paged_attention_prefill"}


def attend_step(case: Case, dtype):
    """(function, arguments): one layer's attention in a step as large as `case`, the cache donated."""
    S, K, H, R = case.block_size, case.num_kv_heads, case.head_dim, len(case.rows) + case.empty_rows or 1
    N, T = K * case.group_size, case.num_tokens + case.padding
    struct = jax.ShapeDtypeStruct

    def attend(kv, q_TNH, k_TKH, v_TKH, sinks_N, *where):
        metadata = rpa.make_metadata(R, *where, num_tokens=T, block_size=S, window=case.window, backend="tpu")
        return rpa.ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, kv, metadata, scale=H**-0.5, window=case.window, soft_cap=case.soft_cap,
            sinks_N=sinks_N if case.sinks else None, backend="tpu",
        )  # fmt: skip

    kv = jax.eval_shape(lambda: rpa.kv_zeros(500, S, K, H, dtype, "tpu"))
    new_TKH = struct((T, K, H), dtype)
    where = struct((R + 1,), jnp.int32), struct((R,), jnp.int32), struct((R, 40), jnp.int32)
    return attend, (kv, struct((T, N, H), dtype), new_TKH, new_TKH, struct((N,), jnp.float32), *where)


def cases():
    for case in CASES:
        for dtype in (jnp.bfloat16, jnp.float32):
            if case.block_size % (32 // jnp.dtype(dtype).itemsize) == 0:
                quick = case.name in QUICK and dtype == jnp.bfloat16
                marks = () if quick else pytest.mark.slow
                yield pytest.param(case, dtype, id=f"{case.name}, {jnp.dtype(dtype)}", marks=marks)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("case", "dtype"), list(cases()))
def test_a_case_compiles_updates_the_cache_in_place_and_fits_vmem(case, dtype, target, record_property):
    attend, args = attend_step(case, dtype)
    compiled = compile_for(target, attend, *args, donate=(0,))
    vmem = vmem_of_kernels(compiled)
    record_property("vmem", str(vmem))
    assert set(vmem) == KERNELS
    assert max(vmem.values()) <= tiles.VMEM_LIMIT_BYTES < target.info.vmem_capacity_bytes
    kv_bytes = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    assert compiled.memory_analysis().alias_size_in_bytes == kv_bytes
