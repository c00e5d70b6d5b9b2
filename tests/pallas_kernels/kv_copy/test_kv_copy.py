"""Every backend of kv_copy against a loop in numpy, with NaN in the blocks that nobody names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kv_copy
from pallas_kernels.kv_copy import tpu
from pallas_kernels.kv_copy.cases import CASES, Case
from pallas_kernels.testing import bits, is_simulated, run_once

INTERPRET = {"reference": False, "tpu": pltpu.InterpretParams(detect_races=True), "gpu": is_simulated("gpu")}
CASE = {case.name: case for case in CASES}


def make_pool(case: Case) -> list[np.ndarray]:
    """Random bits, so that NaN payloads count; and NaN proper in every block that is no pair's source."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    shape_in_bytes = (case.num_blocks, *case.block[:-1], case.block[-1] * dtype.itemsize)
    pool = [rng.integers(0, 256, shape_in_bytes, np.uint8).view(dtype) for _ in range(case.num_arrays)]
    unnamed = [block for block in range(case.num_blocks) if block not in dict(case.pairs)]
    if dtype.kind != "i":
        for x_B in pool:
            x_B[unnamed] = np.nan
    return pool


def copied(case: Case, pool: list[np.ndarray]) -> list[np.ndarray]:
    after = [x_B.copy() for x_B in pool]
    inside = range(case.num_blocks)
    for source, target in case.pairs:
        if source in inside and target in inside:
            for x_B, y_B in zip(pool, after):
                y_B[target] = x_B[source]
    return after


def ids(case: Case) -> tuple[np.ndarray, np.ndarray]:
    pairs_P2 = np.array(case.pairs, np.int64).reshape(-1, 2).astype(np.int32)
    return pairs_P2[:, 0], pairs_P2[:, 1]


@pytest.mark.parametrize("backend", INTERPRET)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_targets_become_their_sources_and_nothing_else_changes(case, backend):
    pool = make_pool(case)
    copy = functools.partial(kv_copy.copy_blocks, backend=backend, interpret=INTERPRET[backend])
    after = run_once(copy, tuple(pool), *ids(case))
    for found_B, should_B in zip(after, copied(case, pool), strict=True):
        np.testing.assert_array_equal(bits(found_B), bits(should_B))


def test_more_pairs_than_ids_fit_into_scalar_memory_are_copied_in_parts(monkeypatch):
    monkeypatch.setattr(tpu, "MAX_PAIRS", 3)
    test_targets_become_their_sources_and_nothing_else_changes(CASE["padding of every kind"], "tpu")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_gathered_blocks_scattered_again_change_nothing_but_those_blocks(case):
    pool, (source_P, target_P) = make_pool(case), ids(case)
    blocks = run_once(kv_copy.gather_blocks, tuple(pool), source_P)
    inside_P = (source_P >= 0) & (source_P < case.num_blocks)
    for x_B, x_P in zip(pool, blocks, strict=True):
        np.testing.assert_array_equal(bits(x_P)[inside_P], bits(x_B[source_P[inside_P]]))
        assert not bits(x_P)[~inside_P].any()
    after = run_once(kv_copy.scatter_blocks, tuple(pool), target_P, blocks)
    for x_B, x_P, found_B in zip(pool, blocks, after, strict=True):
        should_B = x_B.copy()
        for entry, target in enumerate(target_P):
            if 0 <= target < case.num_blocks:
                should_B[target] = np.asarray(x_P)[entry]
        np.testing.assert_array_equal(bits(found_B), bits(should_B))


def test_a_donated_pool_is_updated_in_place():
    pool = (jnp.zeros((64, 2, 16, 8)),)
    id_P = jax.ShapeDtypeStruct((4,), jnp.int32)
    copy = jax.jit(lambda pool, s, t: kv_copy.copy_blocks(pool, s, t, backend="reference"), donate_argnums=0)
    memory = copy.lower(pool, id_P, id_P).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool[0].nbytes
    assert memory.temp_size_in_bytes < pool[0].nbytes / 4


# ---- bad input -----------------------------------------------------------------------------------

POOL = (jnp.zeros((4, 2, 8, 8)),)
ID_P = jnp.zeros(2, jnp.int32)


@pytest.mark.parametrize(
    ("source_P", "target_P", "message"),
    [
        (ID_P.astype(jnp.float32), ID_P, r"source_P is float32\[2\]; accepted is int32\[P\]"),
        (ID_P, ID_P[None], r"target_P is int32\[1, 2\]; accepted is int32\[P\]"),
        (ID_P, ID_P[:1], r"source_P has 2 ids and target_P 1"),
    ],
)
def test_bad_ids_are_refused(source_P, target_P, message):
    with pytest.raises(ValueError, match=message):
        kv_copy.copy_blocks(POOL, source_P, target_P, backend="reference")


def test_arrays_that_are_no_pool_are_refused():
    with pytest.raises(ValueError, match="same number of blocks"):
        kv_copy.gather_blocks((POOL[0], POOL[0][:3]), ID_P)
    with pytest.raises(ValueError, match=r"blocks are .*, but 2 blocks of this pool are"):
        kv_copy.scatter_blocks(POOL, ID_P, (POOL[0][:2].astype(jnp.bfloat16),))


def test_a_backend_says_why_it_cannot():
    assert kv_copy.backends("cpu") == {"reference": None, "tpu": "it needs a TPU", "gpu": "it needs an NVIDIA GPU"}
    assert kv_copy.choose_backend("auto", "cpu", POOL) == "reference"
    assert kv_copy.choose_backend("auto", "tpu", POOL) == "tpu"
    assert kv_copy.choose_backend("auto", "gpu", POOL) == "gpu"
    with pytest.raises(ValueError, match="unknown kv_copy backend 'dma'; known are 'auto', 'reference', 'tpu', 'gpu'"):
        kv_copy.choose_backend("dma", "tpu")
    with pytest.raises(ValueError, match="'gpu' cannot run on 'tpu': it needs an NVIDIA GPU. Use 'auto'"):
        kv_copy.choose_backend("gpu", "tpu")
    flat = (jnp.zeros((4, 8)),)
    assert kv_copy.choose_backend("auto", "tpu", flat) == "reference"
    with pytest.raises(ValueError, match=r"shapes \[\(4, 8\)\]; accepted are arrays with three axes or more"):
        kv_copy.copy_blocks(flat, ID_P, ID_P, backend="tpu")
    packed = (jnp.zeros((4, 2, 8), jnp.int4),)
    with pytest.raises(ValueError, match="int4; accepted are elements of 8 bits or more"):
        kv_copy.copy_blocks(packed, ID_P, ID_P, backend="gpu")
