"""Choosing a backend, and what the interface refuses."""

import jax.numpy as jnp
import pytest

from pallas_kernels import ragged_paged_attention as rpa


def test_auto_chooses_a_backend_that_runs_everywhere():
    for platform, chosen in (("cpu", "reference"), ("gpu", "gpu"), ("tpu", "tpu")):
        assert rpa.backends(platform)["reference"] is None
        assert rpa.choose_backend("auto", platform) == chosen
        assert rpa.choose_backend("reference", platform) == "reference"


def test_an_unknown_backend_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'.*'auto', .*'reference'"):
        rpa.choose_backend("flash", "cpu")


def test_the_shape_of_the_cache_has_its_kv_heads_where_it_says():
    shape = rpa.kv_shape(7, 16, 3, 10, "reference")
    assert shape == (7, 3, 16, 10)
    assert shape[rpa.kv_heads_axis("reference")] == 3
    kv = rpa.kv_zeros(7, 16, 3, 10, jnp.bfloat16, "reference")
    assert [(x.shape, x.dtype) for x in kv.arrays] == [(shape, jnp.bfloat16)] * rpa.num_kv_arrays("reference")


def test_query_heads_that_cannot_share_the_kv_heads_are_refused():
    kv = rpa.kv_zeros(2, 16, 2, 8, jnp.float32, "reference")
    metadata = rpa.make_metadata(
        0, jnp.zeros(2), jnp.zeros(1), jnp.zeros((1, 1)), num_tokens=4, block_size=16, window=None, backend="reference"
    )
    x_T2H = jnp.zeros((4, 2, 8))
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        rpa.ragged_paged_attention(jnp.zeros((4, 3, 8)), x_T2H, x_T2H, kv, metadata, scale=1.0, backend="reference")
