"""Where experts should be, and how they get there: in numpy, and on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.worker.expert_balancer import balancedness, load_between
from jaxpaged.worker.expert_placing import balanced, device_loads, experts_of, first_experts, sources, tables
from jaxpaged.worker.step.expert_moves import moved, rows_at_once


def zipf(num_experts, seed):
    """A router that likes few experts: each of them half as often as one that is twice as popular."""
    return np.random.default_rng(seed).permutation(1000.0 / np.arange(1, num_experts + 1))


@pytest.mark.parametrize(("num_experts", "num_places", "num_devices"), [(5, 8, 4), (16, 16, 8), (64, 72, 8), (3, 8, 8)])
def test_every_expert_has_a_place_and_devices_are_loaded_more_evenly(num_experts, num_places, num_devices):
    load_E, first_e = zipf(num_experts, 1), first_experts(num_experts, num_places)
    expert_e = balanced(load_E, num_places, num_devices)
    assert expert_e.shape == first_e.shape and set(expert_e) == set(first_e) == set(range(num_experts))
    before, after = (balancedness([device_loads(each, load_E, num_devices)]) for each in (first_e, expert_e))
    assert after > before
    np.testing.assert_array_equal(experts_of(tables(expert_e, num_experts)), expert_e)
    np.testing.assert_array_equal(first_e[sources(first_e, expert_e)], expert_e)


def test_places_to_spare_go_to_the_most_popular_on_devices_of_their_own():
    """64 experts on 8 devices: the gain that copies bring."""
    load_E = zipf(64, 2)
    gain = {n: balancedness([device_loads(balanced(load_E, 64 + n, 8), load_E, 8)]) for n in (0, 8, 16)}
    in_order = balancedness([device_loads(first_experts(64, 64), load_E, 8)])
    assert in_order < 0.5 < gain[0] < 0.7 < 0.95 < gain[8] <= gain[16] + 0.01
    expert_e = balanced(load_E, 72, 8).reshape(8, 9)
    assert all(len(set(of_device)) == 9 for of_device in expert_e.tolist())  # no device has one twice


def test_tables_name_all_places_of_an_expert_and_keep_their_shapes():
    some = tables(np.array([2, 0, 1, 0, 0]), 3)
    np.testing.assert_array_equal(some.num_places_E, [3, 1, 1])
    np.testing.assert_array_equal(some.place_ER, [[1, 3, 4], [2, 2, 2], [0, 0, 0]])
    assert tables(np.array([0, 1, 2, 2, 1]), 3).place_ER.shape == some.place_ER.shape


def test_no_load_moves_nothing_and_is_no_number_to_divide_by():
    assert balancedness([np.zeros(4)]) == 1.0
    expert_e = balanced(np.zeros(4), 8, 4)
    assert set(expert_e) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("dtype", "shape", "tile"), [("bfloat16", (8, 6, 5), 2), ("int8", (8, 4, 3), 4), ("float32", (8, 6), 3)]
)
def test_devices_exchange_experts_bit_for_bit(dtype, shape, tile):
    mesh, rng = make_mesh(4, spreads_experts=True), np.random.default_rng(3)
    spec = PartitionSpec("expert")
    weights = (rng.standard_normal(shape) * 50).astype(jnp.dtype(dtype))
    source_e = rng.integers(0, 8, 8).astype(np.int32)
    move = jax.shard_map(
        lambda own, source_e: moved(own, source_e, 4, tile),
        mesh=mesh,
        in_specs=(spec, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    there = jax.jit(move)(jax.device_put(weights, NamedSharding(mesh, spec)), source_e)
    np.testing.assert_array_equal(np.asarray(there), weights[source_e])


def test_what_is_sent_at_a_time_is_bounded_and_divides_the_rows():
    assert rows_at_once(768, 8 * 2 * 2048) == 768
    assert rows_at_once(2048, 64 * 2 * 7168) == 64
    assert rows_at_once(7, 1 << 30) == 1


def test_what_all_ranks_have_counted_is_added_up_though_counts_wrap_around():
    before, after = (np.array(lines, np.uint32) for lines in ([[2**32 - 3, 5], [7, 1]], [[4, 5], [9, 11]]))
    assert load_between(before, after, 1).tolist() == [[7, 0], [2, 10]]
    assert load_between(before, after, 2).tolist() == [[9, 10]]
    assert load_between(None, after, 2).tolist() == [[13, 16]]
