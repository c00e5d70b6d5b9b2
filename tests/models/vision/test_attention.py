"""Attention of towers against a dense mask: segments, tiles, short segments, queries split over devices, and the kernel
of TPUs in its simulator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.models.vision import attention
from jaxpaged.models.vision.attention import PADDING, attend_patches

SEGMENTS = [3, 64, 1, 40, 17, 64, 64, 30, 5, 2]
"""Lengths; together 290."""


def inputs(num_patches=300):
    rng = np.random.default_rng(0)
    segment = np.full(num_patches, PADDING, np.int32)
    segment[:290] = np.repeat(np.arange(10), SEGMENTS)
    return rng.standard_normal((3, num_patches, 2, 8), np.float32), segment


def dense(q, k, v, segment, scale):
    scores = np.einsum("qnh,snh->nqs", q, k).astype(np.float64) * scale
    scores = np.where(segment[:, None] == segment[None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqs,snh->qnh", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("longest", [None, 64])
@pytest.mark.parametrize("num_scores", [2**25, 2**10])
def test_every_patch_sees_its_segment_and_nothing_else(longest, num_scores, monkeypatch):
    monkeypatch.setattr(attention, "SCORES", num_scores)
    (q, k, v), segment = inputs()
    found = jax.jit(lambda *x: attend_patches(*x, 0.3, longest=longest))(q, k, v, segment)
    np.testing.assert_allclose(found[:290], dense(q, k, v, segment, 0.3)[:290], atol=2e-6)
    assert np.isfinite(found).all()


def test_without_segments_all_patches_see_each_other():
    (q, k, v), _ = inputs()
    found = attend_patches(q, k, v, None, 0.3)
    np.testing.assert_allclose(found, dense(q, k, v, np.zeros(300), 0.3), atol=2e-6)


@pytest.mark.parametrize("longest", [None, 64])
def test_queries_are_split_over_devices(longest):
    (q, k, v), segment = inputs(1024)
    mesh = make_mesh(8)
    found = jax.jit(lambda *x: attend_patches(*x, 0.3, longest=longest, mesh=mesh))(q, k, v, segment)
    np.testing.assert_allclose(found[:290], dense(q, k, v, segment, 0.3)[:290], atol=2e-6)
    assert found.sharding.shard_shape(found.shape)[0] == 128


def test_short_segments_are_read_with_few_keys():
    (q, k, v), segment = inputs(4096)
    count = lambda longest: jax.jit(lambda *x: attend_patches(*x, 0.3, longest=longest)).lower(q, k, v, segment)
    flops = [count(longest).compile().cost_analysis()["flops"] for longest in (None, 64)]
    assert 500 * flops[1] < flops[0]


def test_long_segments_in_bfloat16_go_through_the_kernel_of_tpus():
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 1024, 1, 72), np.float32).astype(jnp.bfloat16)
    segment = np.repeat(np.int32([0, 1, PADDING]), [700, 200, 124])
    attend = jax.jit(lambda *x: attend_patches(*x, 0.3))
    on_tpu = attend.trace(q, k, v, segment).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in on_tpu and "tpu_custom_call" not in attend.lower(q, k, v, segment).as_text()
    with pltpu.force_tpu_interpret_mode():
        found = jax.jit(partial(attention.attend_flash, scale=0.3))(q, k, v, segment, segment)
    exact = dense(*(x.astype(np.float64) for x in (q, k, v)), segment, 0.3)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=0.02)
