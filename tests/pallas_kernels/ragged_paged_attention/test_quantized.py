"""Caches of 8 bits: what is stored, and attention over it on every backend, against dense attention in float64."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import Case
from pallas_kernels.ragged_paged_attention.quantized import LARGEST, quantize, token_scales, why_not
from pallas_kernels.ragged_paged_attention.tpu import TpuBackend
from pallas_kernels.testing import Step, is_simulated, make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import attend_step, case_tolerance, error, marks

CASE = Case("quantised", ((300, 1), (20, 40), (37, 1), (0, 1), (130, 3)), group_size=3, window=150)
AHEAD = dataclasses.replace(CASE, both_ways=((1, 15, 55), (4, 130, 133)), window=30)
GPU = "gpu-interpret" if is_simulated("gpu") else "gpu"
INT8, FP8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn)


@dataclasses.dataclass
class Quantized:
    """A step whose keys and values are exactly what `stored * scale` says; stored ones poison where nobody looks."""

    step: Step
    caches: tuple[np.ndarray, np.ndarray]  # stored, [B, K, S, H]
    scales: tuple[np.ndarray, np.ndarray]  # [B, S, K] or [K]
    caches_after: tuple[np.ndarray, np.ndarray]
    scales_after: tuple[np.ndarray, np.ndarray]

    def tensor(self, backend: str, dtype: Any, kind: str, *, after: bool) -> rpa.KVTensor:
        layout = rpa.kv_layout(backend)
        caches, scales = (self.caches_after, self.scales_after) if after else (self.caches, self.scales)
        arrays = layout.pack(*(jnp.asarray(x, dtype).swapaxes(1, 2) for x in caches))
        scales = tuple(jnp.asarray(x, jnp.float32) for x in scales)
        packed = {"none": lambda: (), "head": lambda: scales, "token": lambda: layout.pack_scales(*scales)}[kind]()
        return rpa.KVTensor(arrays, packed)


def quantized_step(case: Case, dtype: Any, kv_dtype: Any, kind: str) -> Quantized:
    """Scales are powers of two, so that nothing is rounded twice and `dtype` holds everything."""
    step, rng = make_step(case, dtype), np.random.default_rng(1)
    K, S, poison = case.num_kv_heads, case.block_size, -128 if kv_dtype == INT8 else np.nan
    B = len(step.k_BKSH)
    caches, scales = [np.full(step.k_BKSH.shape, poison, np.float32) for _ in "kv"], []
    for _ in "kv":
        shape = {"none": K, "head": K, "token": (B, S, K)}[kind]
        scales.append(
            {"none": np.ones(shape), "head": 2.0 ** -rng.integers(6, 9, shape), "token": np.full(shape, np.nan)}[kind]
        )
    caches_after, scales_after = [x.copy() for x in caches], [x.copy() for x in scales]
    contexts = []
    for row, (cached, new) in enumerate(case.rows):
        contexts.append([])
        for x, after, scale, scale_after in zip(caches, caches_after, scales, scales_after):
            stored_PKH = random_stored(rng, (cached + new, K, case.head_dim), kv_dtype)
            scale_PK = 2.0 ** -rng.integers(6, 9, (cached + new, K)) if kind == "token" else scale * np.ones((1, K))
            contexts[-1].append((stored_PKH * scale_PK[..., None]).astype(np.float32))
            first = 0 if case.window is None else max(0, cached - case.window + 1)
            for cache, cache_scale, end in ((x, scale, cached), (after, scale_after, cached + new)):
                position = np.arange(first, end)
                block = step.block_tables_RM[row, position // S]
                cache[block, :, position % S] = stored_PKH[position]
                if kind == "token":
                    cache_scale[block, position % S] = scale_PK[position]
        tokens = slice(*step.query_start_loc_R1[row : row + 2])
        step.k_TKH[tokens], step.v_TKH[tokens] = (x[cached:] for x in contexts[-1])
    step.contexts = contexts
    return Quantized(step, tuple(caches), tuple(scales), tuple(caches_after), tuple(scales_after))


def random_stored(rng: np.random.Generator, shape: tuple[int, ...], kv_dtype: Any) -> np.ndarray:
    """Numbers of `kv_dtype`, the largest one in every vector."""
    stored = np.clip(rng.normal(size=shape) / 3, -1, 1) * LARGEST[kv_dtype]
    stored = np.round(stored) if kv_dtype == INT8 else stored.astype(kv_dtype).astype(np.float64)
    stored[..., 0] = LARGEST[kv_dtype]
    return stored


CASES = [
    ("reference", CASE, jnp.float32, INT8, "token"),
    ("reference", CASE, jnp.bfloat16, FP8, "head"),
    ("reference", CASE, jnp.float32, FP8, "none"),
    ("tpu-interpret", CASE, jnp.bfloat16, INT8, "token"),
    ("tpu-interpret", CASE, jnp.float32, FP8, "token"),
    ("tpu-interpret", CASE, jnp.bfloat16, INT8, "head"),
    ("tpu-interpret", CASE, jnp.bfloat16, FP8, "none"),
    (GPU, CASE, jnp.bfloat16, INT8, "token"),
    (GPU, CASE, jnp.float32, FP8, "token"),
    (GPU, CASE, jnp.bfloat16, INT8, "head"),
    (GPU, CASE, jnp.float16, FP8, "none"),
    ("gpu-triton-interpret", CASE, jnp.bfloat16, INT8, "token"),
    ("gpu-triton-interpret", CASE, jnp.float32, FP8, "token"),
    ("gpu-triton-interpret", CASE, jnp.bfloat16, INT8, "head"),
    ("gpu-triton-interpret", CASE, jnp.float16, FP8, "none"),
    ("reference", AHEAD, jnp.float32, INT8, "token"),
    ("tpu-interpret", AHEAD, jnp.bfloat16, FP8, "head"),
    (GPU, AHEAD, jnp.float32, INT8, "head"),
    ("gpu-triton-interpret", AHEAD, jnp.float32, INT8, "token"),
]
QUICK = [*CASES[:3], CASES[3], CASES[7], CASES[-4]]


@pytest.mark.parametrize(
    ("backend", "case", "dtype", "kv_dtype", "kind"),
    [
        pytest.param(*x, id=f"{x[0]}, {x[3]}, {x[4]}{', both ways' * (x[1] is AHEAD)}", marks=marks(x in QUICK))
        for x in CASES
    ],
)
def test_attention_over_a_quantised_cache_equals_attention_over_what_it_means(
    monkeypatch, backend, case, dtype, kv_dtype, kind
):
    refusal = rpa.backends("cpu")[backend]
    if refusal is not None:
        pytest.skip(refusal)
    if backend == "tpu-interpret":
        interpret = pltpu.InterpretParams(detect_races=True)
        monkeypatch.setitem(rpa._BACKENDS, backend, TpuBackend(interpret=interpret))
    problem = quantized_step(case, dtype, kv_dtype, kind)
    before = problem.tensor(backend, kv_dtype, kind, after=False)
    out_TNH, after = attend_step(case, problem.step, dtype, backend, before)
    largest = max(np.abs(v_PKH).max() for _, v_PKH in problem.step.contexts)
    assert error(case, out_TNH, problem.step) <= largest * case_tolerance(case, dtype)
    should = problem.tensor(backend, kv_dtype, kind, after=True)
    for is_, should_be in zip((*after.arrays, *after.scales), (*should.arrays, *should.scales), strict=True):
        np.testing.assert_array_equal(np.asarray(is_, np.float32), np.asarray(should_be, np.float32))


def test_what_is_stored_times_its_scale_is_near_what_was_given():
    x_TKH = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 64)), jnp.float32).at[0].set(0)
    for dtype, share in ((INT8, 0.5 / 127), (FP8, 1 / 16)):
        scale_TK = token_scales(x_TKH, dtype)
        stored_TKH = quantize(x_TKH, scale_TK, dtype)
        top_TK1 = jnp.abs(x_TKH).max(axis=-1, keepdims=True)
        assert stored_TKH.dtype == dtype
        assert (jnp.abs(stored_TKH.astype(jnp.float32)).max(axis=-1)[1:] == LARGEST[dtype]).all()
        assert (jnp.abs(stored_TKH.astype(jnp.float32) * scale_TK[..., None] - x_TKH) <= share * top_TK1 * 1.01).all()


def test_what_is_beyond_the_largest_number_is_cut_off_and_not_wrapped():
    x_TKH = jnp.array([[[1e4, -1e4, 300.0]]])
    assert quantize(x_TKH, jnp.ones((1, 1)), INT8).tolist() == [[[127, -127, 127]]]
    assert quantize(x_TKH, jnp.ones((1, 1)), FP8).astype(jnp.float32).tolist() == [[[448.0, -448.0, 288.0]]]


def test_scales_that_do_not_go_with_a_cache_are_refused():
    assert why_not(INT8, "token") is None
    with pytest.raises(ValueError, match=r"kv_scales = 'token' for a cache of bfloat16; accepted are int8, float8_e4"):
        rpa.kv_zeros(2, 16, 1, 8, jnp.bfloat16, "reference", "token")
    with pytest.raises(ValueError, match=r"kv_scales = 'none' for a cache of int8.*accepted are 'head', 'token'"):
        rpa.kv_zeros(2, 16, 1, 8, jnp.int8, "reference")
    with pytest.raises(ValueError, match=r"kv_scales = 'block'; accepted are 'none', 'head', 'token'"):
        rpa.kv_zeros(2, 16, 1, 8, jnp.int8, "reference", "block")


@pytest.mark.parametrize("backend", ["reference", "tpu"])
def test_an_empty_quantised_cache_has_scales_of_one(backend):
    kv = rpa.kv_zeros(7, 16, 3, 10, jnp.int8, backend, "token")
    assert sum(x.size for x in kv.scales) >= 2 * 7 * 16 * 3
    assert all((x == 1).all() and x.shape[rpa.kv_heads_axis(backend)] == 3 for x in kv.scales)
    assert [x.shape for x in rpa.kv_zeros(7, 16, 3, 10, jnp.int8, backend, "head").scales] == [(3,), (3,)]
