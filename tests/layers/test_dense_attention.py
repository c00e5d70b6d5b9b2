"""Attention of whole texts: what the definition of paged attention gives for the same tokens, and who sees whom."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.layers.attention import AttentionBatch, AttentionContext, allocate_kv, attend, step_metadata
from jaxpaged.layers.dense_attention import DenseBatch, positions_in, visible_tokens

SEGMENTS_RC = jnp.array([[5, 5, 5, 5, 9, 9], [1, 2, 2, 2, 2, 2]], jnp.int32)


def test_positions_begin_with_each_text():
    assert positions_in(SEGMENTS_RC).tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    assert positions_in(jnp.array([[1, 1], [1, 2]])).tolist() == [[0, 1], [0, 0]], "the last text is another one"


def test_a_token_sees_its_window_or_its_chunk():
    seen = lambda **limits: visible_tokens(DenseBatch(SEGMENTS_RC, make_mesh(1), **limits))[1].astype(int).tolist()
    assert seen(window=2)[4:] == [[0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert seen(chunk=2)[1:] == [
        [0, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("window", [None, 3])
def test_it_is_paged_attention_of_the_same_tokens(window):
    random = np.random.default_rng(0)
    q_TNH, k_TKH, v_TKH = (jnp.asarray(random.standard_normal((12, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    settings = {"scale": 0.3, "soft_cap": 2.0, "sinks_N": jnp.array([0.5, -1.0, 2.0, 0.0])}
    context = AttentionContext(make_mesh(1), "reference")
    starts, lengths = jnp.array([0, 4, 6, 7, 12]), jnp.array([4, 2, 1, 5])
    tables, sizes = jnp.arange(8).reshape(4, 2), {"block_size": 4, "window": window, "num_tokens": 12}
    metadata = step_metadata(context, jnp.int32(4), starts, lengths, tables, **sizes)
    paged = AttentionBatch(metadata, context, window)
    wanted, _ = attend(paged, q_TNH, k_TKH, v_TKH, allocate_kv(context, 8, 4, 2, 8, jnp.float32), **settings)
    dense = DenseBatch(SEGMENTS_RC, context.mesh, window)
    found, kv = attend(dense, q_TNH, k_TKH, v_TKH, None, **settings)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    again, _ = attend(dense, q_TNH, None, None, kv, **settings)
    np.testing.assert_array_equal(again, found, "another layer's keys and values")
