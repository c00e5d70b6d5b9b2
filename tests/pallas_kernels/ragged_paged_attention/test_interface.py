"""Choosing a backend, what the interface refuses, and steps whose keys are cached already."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.context_share import ContextShare
from pallas_kernels.llvm.machine import why_not
from pallas_kernels.ragged_paged_attention.cases import CASES
from pallas_kernels.testing import make_step
from tests.pallas_kernels.ragged_paged_attention.one_step import after, attend_step, case_tolerance, error, packed


def test_the_reference_runs_everywhere_and_auto_prefers_the_platforms_own_kernel():
    for platform, chosen in (("cpu", "cpu" if why_not() is None else "reference"), ("gpu", "gpu"), ("tpu", "tpu")):
        assert rpa.backends(platform)["reference"] is None
        assert rpa.choose_backend("auto", platform) == chosen
        assert rpa.choose_backend("reference", platform) == "reference"


def test_a_kernel_that_cannot_run_here_is_refused_with_what_can():
    with pytest.raises(ValueError, match=r"'tpu' cannot run on 'cpu': it needs a TPU; 'tpu-interpret' runs the same"):
        rpa.choose_backend("tpu", "cpu")
    assert rpa.choose_backend("tpu-interpret", "cpu") == "tpu-interpret"


def test_an_unknown_backend_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'.*'auto', .*'reference'"):
        rpa.choose_backend("flash", "cpu")


@pytest.mark.parametrize(("backend", "shape"), [("reference", (7, 3, 16, 10)), ("tpu", (7, 3, 16, 128))])
def test_the_shape_of_the_cache_has_its_kv_heads_and_slots_where_it_says(backend, shape):
    assert rpa.kv_shape(7, 16, 3, 10, backend) == shape
    assert shape[rpa.kv_heads_axis(backend)] == 3
    assert shape[rpa.kv_layout(backend).slots_axis] == 16
    kv = rpa.kv_zeros(7, 16, 3, 10, jnp.bfloat16, backend)
    assert [(x.shape, x.dtype) for x in kv.arrays] == [(shape, jnp.bfloat16)] * rpa.num_kv_arrays(backend)
    numbers = sum(x.size for x in kv.arrays)
    assert numbers == 2 * 7 * 16 * 3 * rpa.kv_layout(backend).stored_dim(10)


@pytest.mark.parametrize("backend", ["reference", "tpu"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_a_layout_gives_back_what_it_was_given(backend, head_dim):
    layout = rpa.kv_layout(backend)
    k_BSKH, v_BSKH = np.random.default_rng(0).normal(size=(2, 3, 16, 2, head_dim)).astype(np.float32)
    arrays = layout.pack(k_BSKH, v_BSKH)
    assert {x.shape for x in arrays} == {layout.shape(3, 16, 2, head_dim)}
    for given, back in zip((k_BSKH, v_BSKH), layout.unpack(arrays, head_dim)):
        np.testing.assert_array_equal(given, back)


PROBLEM = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "block_size": 16,
    "q_dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 9}, "9 query heads cannot share 2"),
        ({"q_dtype": "float16"}, "'tpu' cannot take q is float16; accepted are bfloat16, float32. Use 'reference'"),
        ({"kv_dtype": "float16"}, "the cache is float16; accepted are bfloat16, float32"),
        ({"block_size": 8}, "block_size = 8; accepted are multiples of 16 for a cache of bfloat16"),
        ({"block_size": 24}, "block_size = 24; accepted are multiples of 16"),
        ({"num_heads": 512}, "512 query heads over 2 of head_dim 128 need [0-9]+ MiB of VMEM; accepted is"),
    ],
)
def test_what_a_kernel_cannot_take_is_refused_before_tracing_with_what_it_takes(changes, message):
    with pytest.raises(ValueError, match=message):
        rpa.check("tpu", **(PROBLEM | changes))


def test_what_the_kernels_take_is_not_refused():
    for changes in ({}, {"block_size": 256}, {"kv_dtype": "float32", "block_size": 8}, {"head_dim": 80}):
        rpa.check("tpu", **(PROBLEM | changes))
    rpa.check("reference", **(PROBLEM | {"block_size": 5, "q_dtype": "float16"}))


def test_query_heads_that_cannot_share_the_kv_heads_are_refused():
    kv = rpa.kv_zeros(2, 16, 2, 8, jnp.float32, "reference")
    metadata = rpa.make_metadata(
        0, jnp.zeros(2), jnp.zeros(1), jnp.zeros((1, 1)), num_tokens=4, block_size=16, window=None, backend="reference"
    )
    x_T2H = jnp.zeros((4, 2, 8))
    with pytest.raises(ValueError, match="3 query heads cannot share 2 key-value heads"):
        rpa.ragged_paged_attention(jnp.zeros((4, 3, 8)), x_T2H, x_T2H, kv, metadata, scale=1.0, backend="reference")


def test_values_are_no_wider_than_keys_and_parts_of_contexts_are_as_wide():
    kv = rpa.kv_zeros(2, 16, 2, 8, jnp.float32, "reference")
    x_T2H = jnp.zeros((4, 2, 8))
    attend = lambda width, **more: rpa.ragged_paged_attention(
        x_T2H, x_T2H, jnp.zeros((4, 2, width)), kv, None, scale=1.0, backend="reference", **more
    )
    with pytest.raises(ValueError, match="heads of keys have 8 numbers and those of values 9; pad them"):
        attend(9)
    with pytest.raises(ValueError, match="heads of keys have 8 numbers and those of values 4, undivided; pad them"):
        attend(4, undivided=True)


def test_what_stands_behind_a_token_is_not_seen_in_chunks_in_parts_of_contexts_or_by_decodes():
    where = 0, jnp.zeros(2), jnp.zeros(1), jnp.zeros((1, 1))
    settings = {"num_tokens": 4, "block_size": 16, "window": None, "backend": "reference"}
    for refused in ({"chunk": 32}, {"share": ContextShare(0, 2, 16)}, {"decodes_only": True}):
        with pytest.raises(ValueError, match="attention beyond a token's own position goes neither with chunks"):
            rpa.make_metadata(*where, visible_end_T=jnp.zeros(4, jnp.int32), **settings, **refused)


def test_ends_of_what_tokens_see_lie_behind_them_and_within_their_rows():
    where = 2, jnp.array([0, 3, 5, 5]), jnp.array([13, 4, 0]), jnp.zeros((3, 1))
    given = jnp.array([0, 12, 99, 4, 3, 7], jnp.int32)
    settings = {"num_tokens": 6, "block_size": 16, "window": None, "backend": "reference"}
    ends_T = rpa.make_metadata(*where, visible_end_T=given, **settings).visible_end_T
    assert ends_T[:5].tolist() == [11, 12, 13, 4, 4]
    assert rpa.make_metadata(*where, **settings).visible_end_T is None


@pytest.mark.parametrize(
    "backend", ["reference", "cpu", pytest.param("tpu-interpret", marks=pytest.mark.exhaustive), "gpu-interpret"]
)
def test_a_layer_may_read_what_another_has_cached_and_writes_nothing(backend):
    if backend == "cpu" and why_not() is not None:
        pytest.skip("this machine has no kernels of its own")
    case = next(case for case in CASES if case.name == "window, soft cap and sinks")
    step = make_step(case, jnp.float32)
    kv = packed(*after(case, step), jnp.float32, backend)
    before = [np.asarray(x) for x in kv.arrays]
    q_TNH = np.where(np.arange(len(step.q_TNH))[:, None, None] < case.num_tokens, step.q_TNH, 0)
    cached = dataclasses.replace(step, q_TNH=q_TNH, k_TKH=None, v_TKH=None)
    out_TNH, kv = attend_step(case, cached, jnp.float32, backend, kv)
    assert error(case, out_TNH, step) <= case_tolerance(case, jnp.float32)
    for is_, was in zip(kv.arrays, before):
        np.testing.assert_array_equal(np.asarray(is_), was)
