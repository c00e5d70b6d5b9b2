"""The bytes and operations that a step cannot avoid, counted one by one."""

import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention.cases import SERVING_STEPS, serving_step
from pallas_kernels.serving import block_table

ROWS = ((10, 1), (0, 7), (5, 3))


def seen(rows, window):
    """For each row whether each query sees each slot."""
    for cached, new in rows:
        distance_QP = np.arange(cached, cached + new)[:, None] - np.arange(cached + new)
        yield (distance_QP >= 0) & (distance_QP < (window or cached + new))


@pytest.mark.parametrize("window", [None, 4])
def test_bytes_and_operations_are_those_of_what_queries_see(window):
    heads = {"num_kv_heads": 3, "group_size": 2, "head_dim": 8}
    step = serving_step("x", ROWS, **heads, window=window, cache_dtype="int8", kv_scales="token")
    slots = sum(visible_QP.any(axis=0).sum() for visible_QP in seen(ROWS, window))
    pairs = sum(visible_QP.sum() for visible_QP in seen(ROWS, window))
    assert step.context_bytes == slots * 3 * 2 * (8 + 4)
    assert step.step_bytes == step.context_bytes + 11 * 6 * 8 * 2 * 2 + 11 * 3 * 8 * 2 * (2 + 1)
    assert step.flops == pairs * 6 * 8 * 2 * 2


def test_what_rows_have_in_common_is_read_once():
    alone, shared = (serving_step("x", ((31, 1),) * 3, in_common, num_kv_heads=1, head_dim=8) for in_common in (0, 16))
    assert alone.context_bytes - shared.context_bytes == 2 * 16 * 2 * 8 * 2


def test_rows_of_a_step_have_blocks_of_their_own_behind_what_they_have_in_common():
    for step in SERVING_STEPS:
        table_RM, num_common = block_table(step), step.in_common // step.shape.block_size
        assert (table_RM[:, :num_common] == table_RM[0, :num_common]).all()
        used = [*table_RM[0, :num_common], *table_RM[:, num_common:][table_RM[:, num_common:] > 0]]
        blocks = [-(-sum(row) // step.shape.block_size) for row in step.rows]
        assert len(set(used)) == len(used) == sum(blocks) - num_common * (len(blocks) - 1)
        assert step.shape.num_tokens == sum(new for _, new in step.rows)
