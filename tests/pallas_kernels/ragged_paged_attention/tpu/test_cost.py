"""What a step costs, against sums written down by hand."""

import jax.numpy as jnp
import pytest

from pallas_kernels.ragged_paged_attention.tpu.cost import Cost, kernel_cost, least_cost, spans_of
from pallas_kernels.ragged_paged_attention.tpu.tiles import Problem

BF16 = jnp.dtype(jnp.bfloat16)
PROBLEM = Problem(num_kv_heads=2, group_size=4, head_dim=128, block_size=128, q_dtype=BF16, kv_dtype=BF16)
SLOT = 2 * 2 * 128 * 2  # bytes of a token's keys and values
QUERY = 2 * 8 * 128 * 2  # bytes of a token's queries and outputs
PAIR = 4 * 8 * 128  # operations of a token that sees another


def test_a_decode_reads_its_context_once_and_writes_one_token():
    assert least_cost(((1023, 1),), PROBLEM, None) == Cost(1024 * SLOT + QUERY, 1024 * PAIR)


def test_a_window_and_a_triangle_are_counted_exactly():
    assert least_cost(((1000, 1),), PROBLEM, 100) == Cost(100 * SLOT + QUERY, 100 * PAIR)
    assert least_cost(((0, 3),), PROBLEM, None) == Cost(3 * SLOT + 3 * QUERY, (1 + 2 + 3) * PAIR)
    assert least_cost(((5, 3),), PROBLEM, 2) == Cost(4 * SLOT + 3 * QUERY, 6 * PAIR)


def test_a_decode_of_whole_blocks_fetches_no_byte_in_vain_and_multiplies_whole_sublanes():
    cost = kernel_cost(((1023, 1),), PROBLEM, None)["decode"]
    assert cost == Cost(1024 * SLOT + QUERY, 2 * 1024 * PAIR)  # four query heads of a kv head, padded to eight


def test_a_prompt_reads_its_context_once_for_each_tile_of_queries():
    cost = kernel_cost(((0, 512),), PROBLEM, None)["prefill"]
    assert cost == Cost((128 + 256 + 384 + 512) * SLOT + 512 * QUERY, 512 * 512 * PAIR)


def test_blocks_outside_of_a_window_cost_nothing():
    near, far = (kernel_cost(((n, 1),), PROBLEM, 128)["decode"] for n in (1151, 100 * 1024 + 127))
    assert near == far and near.num_bytes == 128 * SLOT + QUERY


def test_what_rows_share_is_read_once_for_each_tile_of_queries_and_not_at_all_for_few():
    rows = ((2175, 1),) * 48
    alone = kernel_cost(rows, PROBLEM, None)
    once = kernel_cost(rows, PROBLEM, None, spans_of(rows, 2048, 128))
    assert once["decode"] == Cost(48 * (128 * SLOT + QUERY), 48 * 2 * 256 * PAIR)
    begun = (2 * 64 + 48) * 4 + 2 * 64 * 4  # rows of each kv head: two tiles of queries, and two blocks of decodes
    assert once["spans"].num_bytes == 2 * 2048 * SLOT + 48 * QUERY + begun * 2 * (128 + 128) * 4
    assert once["write"] == alone["write"] and sum(once.values(), Cost(0, 0)).num_bytes * 4 < alone["decode"].num_bytes
    assert not spans_of(rows[:3], 2048, 128).any(), "three rows: less saved than another kernel costs"
    assert spans_of(rows[:4], 2048, 128).any()
    few = kernel_cost(rows[:4], PROBLEM, None, spans_of(rows[:4], 0, 128))
    assert few["spans"] == Cost(0, 0) and few["decode"] == kernel_cost(rows[:4], PROBLEM, None)["decode"]


@pytest.mark.parametrize("rows", [((1023, 1),) * 5, ((0, 700),), ((37, 1), (300, 90), (0, 2))])
def test_kernels_cost_at_least_what_must_be(rows):
    own = sum(kernel_cost(rows, PROBLEM, None).values(), Cost(0, 0))
    least = least_cost(rows, PROBLEM, None)
    assert own.num_bytes >= least.num_bytes and own.flops >= least.flops


def test_the_roofline_is_the_slower_of_both():
    assert Cost(100, 1000).seconds(10, 1000) == 10
    assert Cost(100, 100_000).seconds(10, 1000) == 100
