"""The TPU kernels go through the real compiler for v5e, v6e and TPU7x, within the VMEM that was estimated."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels import tpu_targets
from pallas_kernels.ragged_paged_attention.cases import CASES, Case
from pallas_kernels.ragged_paged_attention.sharing import NUM_LINES
from pallas_kernels.ragged_paged_attention.tpu import tiles
from pallas_kernels.tpu_targets import TARGETS, compile_for, vmem_of_kernels

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(tpu_targets.why_not() is not None, reason=str(tpu_targets.why_not())),
]

INT8, FP8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)
CASE = {case.name: case for case in CASES}
QUICK = ("head_dim 64, block_size 32", "head_dim 128", "head_dim 256, multi-query", "window, soft cap and sinks")
QUANTIZED = [
    pytest.param(INT8, "token", id="int8, token"),
    pytest.param(INT8, "head", id="int8, head", marks=pytest.mark.slow),
    pytest.param(FP8, "token", id="float8, token", marks=pytest.mark.slow),
    pytest.param(FP8, "none", id="float8, none", marks=pytest.mark.slow),
]
KERNELS = {"paged_attention_write", "paged_attention_decode", "paged_attention_prefill"}
SHARES = Case("256 rows that share", ((2100, 1),) * 256, num_kv_heads=8, group_size=4, head_dim=128, sinks=True)
BOTH_WAYS = Case(
    "a picture among decodes",
    (*[(2100, 1)] * 15, (300, 496)),
    num_kv_heads=8,
    head_dim=256,
    window=1024,
    padding=1,
    both_ways=((15, 310, 566),),
)
LONG = Case("256 requests of up to 2M tokens: their block tables take 134 MB", ((0, 1),) * 256, head_dim=128)
ALL_TARGETS = [
    pytest.param(target, id=name, marks=pytest.mark.exhaustive if name == "v6e" else ())
    for name, target in TARGETS.items()
]
"""For a v6e, tests/scripts/test_count_step.py compiles all kernels in each run."""
NUM_BLOCKS = 10_000
"""So many that the compiler cannot move a cache into VMEM, as it does with small arrays."""


def attend_step(case: Case, dtype, *, kv_dtype=None, kv_scales="none", max_blocks=40, shares=False):
    """(function, arguments): one layer's attention in a step as large as `case`, the cache donated."""
    S, K, H, R = case.block_size, case.num_kv_heads, case.head_dim, len(case.rows) + case.empty_rows or 1
    N, T = K * case.group_size, case.num_tokens + case.padding
    struct = jax.ShapeDtypeStruct

    def attend(kv, q_TNH, k_TKH, v_TKH, sinks_N, shared_6R, visible_end_T, *where):
        metadata = rpa.make_metadata(
            R,
            *where,
            num_tokens=T,
            block_size=S,
            window=case.window,
            backend="tpu",
            shared_6R=shared_6R if shares else None,
            visible_end_T=visible_end_T if case.both_ways else None,
        )
        return rpa.ragged_paged_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            kv,
            metadata,
            scale=H**-0.5,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks_N=sinks_N if case.sinks else None,
            backend="tpu",
        )

    kv = jax.eval_shape(lambda: rpa.kv_zeros(NUM_BLOCKS, S, K, H, kv_dtype or dtype, "tpu", kv_scales))
    new_TKH = struct((T, K, H), dtype)
    where = struct((R + 1,), jnp.int32), struct((R,), jnp.int32), struct((R, max_blocks), jnp.int32)
    begin = struct((N,), jnp.float32), struct((NUM_LINES, R), jnp.int32), struct((T,), jnp.int32)
    return attend, (kv, struct((T, N, H), dtype), new_TKH, new_TKH, *begin, *where)


def cases():
    for case in CASES:
        for dtype in (jnp.bfloat16, jnp.float32):
            if case.block_size % (32 // jnp.dtype(dtype).itemsize) == 0:
                quick = case.name in QUICK and dtype == jnp.bfloat16
                marks = () if quick else pytest.mark.slow
                yield pytest.param(case, dtype, id=f"{case.name}, {jnp.dtype(dtype)}", marks=marks)


def compile_and_check(case: Case, dtype, target, record_property, **settings):
    attend, args = attend_step(case, dtype, **settings)
    compiled = compile_for(target, attend, *args, donate=(0,))
    vmem, memory = vmem_of_kernels(compiled), compiled.memory_analysis()
    record_property("vmem", str(vmem))
    assert set(vmem) == KERNELS | ({"paged_attention_spans"} if settings.get("shares") else set())
    assert max(vmem.values()) <= tiles.VMEM_LIMIT_BYTES < target.info.vmem_capacity_bytes
    kv_bytes, tables_bytes = bytes_of(args[0]), bytes_of(args[-1])
    assert memory.alias_size_in_bytes >= kv_bytes
    assert memory.temp_size_in_bytes < kv_bytes / 10 + 1.1 * tables_bytes


def bytes_of(tree) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(("case", "dtype"), list(cases()))
def test_a_case_compiles_updates_the_cache_in_place_and_fits_vmem(case, dtype, target, record_property):
    compile_and_check(case, dtype, target, record_property)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(("kv_dtype", "kv_scales"), QUANTIZED)
def test_a_cache_of_8_bits_compiles_and_is_not_copied(kv_dtype, kv_scales, block_size, target, record_property):
    case = dataclasses.replace(CASE["head_dim 128"], block_size=block_size)
    compile_and_check(case, jnp.bfloat16, target, record_property, kv_dtype=kv_dtype, kv_scales=kv_scales)


# A window is a number more for the kernel, on any chip.
@pytest.mark.parametrize(
    ("window", "target"),
    [
        pytest.param(window, target, id=f"{window}-{name}", marks=pytest.mark.exhaustive if is_left_out else ())
        for window, quick in ((None, "tpu7x"), (1024, "v5e"))
        for name, target in TARGETS.items()
        for is_left_out in [name != quick]
    ],
)
def test_what_rows_share_compiles_and_copies_no_cache(window, target, record_property):
    compile_and_check(dataclasses.replace(SHARES, window=window), jnp.bfloat16, target, record_property, shares=True)


@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize("shares", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_sees_ahead_compiles_within_the_same_memory(shares, target, record_property):
    compile_and_check(BOTH_WAYS, jnp.bfloat16, target, record_property, shares=shares)


def test_block_tables_that_fit_no_scalar_memory_compile(record_property):
    compile_and_check(LONG, jnp.bfloat16, TARGETS["v5e"], record_property, max_blocks=2**17)
