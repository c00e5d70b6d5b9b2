"""Queries and keys normalised and rotated, keys and values written, in one launch: against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.rotation import HeadNorm, Rotation
from pallas_kernels.testing import is_simulated

BACKEND = "gpu-interpret" if is_simulated("gpu") else "gpu"
S, EPS = 16, 1e-5
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def in_numpy(x_TNH, cos_TP, sin_TP, weight_H, is_interleaved):
    """Heads as they should be, in float64."""
    x_TNH = np.asarray(x_TNH, np.float64)
    if weight_H is not None:
        x_TNH = x_TNH / np.sqrt(np.mean(x_TNH**2, axis=-1, keepdims=True) + EPS) * np.asarray(weight_H, np.float64)
    num_pairs = cos_TP.shape[1]
    first = np.arange(num_pairs) * (2 if is_interleaved else 1)
    second = first + (1 if is_interleaved else num_pairs)
    result = x_TNH.copy()
    result[..., first] = x_TNH[..., first] * cos_TP[:, None] - x_TNH[..., second] * sin_TP[:, None]
    result[..., second] = x_TNH[..., second] * cos_TP[:, None] + x_TNH[..., first] * sin_TP[:, None]
    return result


def metadata_of(query_start_loc, seq_lens, tables, num_tokens):
    arrays = map(np.array, (query_start_loc, seq_lens, tables))
    return rpa.make_metadata(2, *arrays, num_tokens=num_tokens, block_size=S, window=None, backend=BACKEND)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "is_interleaved", "is_joined", "is_normed", "dtype"),
    [
        (8, 2, 64, 64, False, False, False, "float32"),
        (4, 2, 128, 128, False, True, True, "bfloat16"),
        (4, 4, 80, 80, True, True, False, "float32"),
        (6, 2, 96, 24, False, False, True, "float32"),
        (3, 1, 40, 16, True, False, False, "float16"),
    ],
)
def test_new_heads_are_what_they_should_be_and_nothing_else_is_touched(
    num_heads, num_kv_heads, head_dim, rotary_dim, is_interleaved, is_joined, is_normed, dtype
):
    rng, num_tokens, num_used, num_blocks, group = np.random.default_rng(0), 19, 17, 4, num_heads // num_kv_heads
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    all_TKJH = normal(num_tokens, num_kv_heads, group + 2, head_dim)
    all_TKJH = all_TKJH.at[num_used:].set(jnp.nan)  # what padding tokens have
    q_TNH = all_TKJH[:, :, :group].reshape(num_tokens, num_heads, head_dim)
    heads = (all_TKJH,) if is_joined else (q_TNH, all_TKJH[:, :, group], all_TKJH[:, :, group + 1])
    angle_TP = rng.normal(size=(num_tokens, rotary_dim // 2)).astype(np.float32)
    cos_TP, sin_TP = np.cos(angle_TP) * np.float32(1.1), np.sin(angle_TP) * np.float32(1.1)
    weights = (normal(head_dim), normal(head_dim)) if is_normed else (None, None)
    rotation = Rotation(cos_TP, sin_TP, is_interleaved, HeadNorm(*weights, EPS) if is_normed else None)
    # Two rows: of 12 tokens behind 7 cached ones, in blocks 2 and 1, and of 5 in block 3.
    tables_RM, slot_T = np.array([[2, 1], [3, 99]]), np.r_[np.arange(7, 19), np.arange(5)]
    block_T = tables_RM[np.repeat([0, 1], [12, 5]), slot_T // S]
    metadata = metadata_of([0, 12, 17], [19, 5], tables_RM, num_tokens)
    before = [np.asarray(normal(num_blocks, num_kv_heads, S, head_dim)) for _ in range(2)]
    kv = rpa.KVTensor(tuple(map(jnp.asarray, before)))
    assert rpa.rotates(BACKEND, kv)
    run = jax.jit(functools.partial(rpa.rotate_and_write, backend=BACKEND), donate_argnums=2)
    out_TNH, written = run(heads, rotation, kv, metadata)
    should = [in_numpy(x, cos_TP, sin_TP, w, is_interleaved) for x, w in zip((q_TNH, all_TKJH[:, :, group]), weights)]
    tolerance = TOLERANCE[dtype] * (4 if is_normed else 1)
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(np.asarray(out_TNH, np.float64)[:num_used], should[0][:num_used])
    assert not np.asarray(out_TNH[num_used:], np.float32).any(), "padding tokens"
    new = should[1], np.asarray(all_TKJH[:, :, group + 1], np.float64)
    for array, was_BKSH, new_TKH, exact in zip(written.arrays, before, new, (False, True)):
        array, is_new_BS = np.array(array, np.float64), np.zeros((num_blocks, S), bool)
        is_new_BS[block_T, slot_T % S] = True
        found_TKH = array[block_T, :, slot_T % S]
        close(found_TKH, new_TKH[:num_used])
        assert not exact or np.array_equal(found_TKH, new_TKH[:num_used])
        others = ~is_new_BS[:, None, :].repeat(num_kv_heads, 1)
        np.testing.assert_array_equal(array[others], was_BKSH.astype(np.float64)[others])


def test_attention_without_new_keys_reads_those_that_are_there():
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q_TNH, k_TKH, v_TKH = normal(4, 4, 32), normal(4, 2, 32), normal(4, 2, 32)
    metadata = metadata_of([0, 1, 3], [9, 2], [[1], [2]], 4)
    kv = rpa.KVTensor((normal(3, 2, S, 32), normal(3, 2, S, 32)))
    attend = jax.jit(functools.partial(rpa.ragged_paged_attention, scale=0.2, backend=BACKEND))
    out_TNH, written = attend(q_TNH, k_TKH, v_TKH, kv, metadata)
    again_TNH, kept = attend(q_TNH.at[3].set(0), None, None, written, metadata)
    np.testing.assert_array_equal(again_TNH, out_TNH)
    jax.tree.map(np.testing.assert_array_equal, kept, written)


def test_caches_of_8_bits_and_other_backends_have_keys_rotated_by_xla():
    arrays = lambda dtype: rpa.KVTensor((jax.ShapeDtypeStruct((2, 2, S, 32), dtype),) * 2)
    assert not rpa.rotates("gpu", arrays(jnp.int8))
    assert not any(rpa.rotates(backend, arrays(jnp.bfloat16)) for backend in ("cpu", "reference", "gpu-triton"))
