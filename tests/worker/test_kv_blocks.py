"""How many KV blocks an engine gets, and the refusal when they cannot hold one request."""

import math

import jax
import jax.numpy as jnp
import pytest

from jaxpaged.config import CacheConfig
from jaxpaged.distributed.backend import SHARE_VARIABLES
from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CapacityError, ConfigError
from jaxpaged.kv_cache_spec import (
    SNAPSHOTS_PER_REQUEST,
    AttentionSpec,
    KVCacheConfig,
    LatentSpec,
    StateArray,
    StateSpec,
    group_layers,
    groups_of_layers,
    max_blocks_per_request,
)
from jaxpaged.layers.attention import AttentionContext
from jaxpaged.worker.cache.kinds import tensor_struct
from jaxpaged.worker.kv_blocks import (
    Demand,
    Division,
    available_host_bytes,
    host_budget,
    memory_for,
    size_kv_cache,
)


class FakeDevice:
    """A device that reports its memory, as accelerators do."""

    def __init__(self, platform, stats=None):
        self.platform, self._stats = platform, stats

    def memory_stats(self):
        return self._stats


FULL = AttentionSpec(block_size=16, num_kv_heads=4, head_dim=64, dtype_bytes=2)
WINDOW = AttentionSpec(block_size=16, num_kv_heads=4, head_dim=64, dtype_bytes=2, window=100)
GROUPS = group_layers([FULL] * 4)
DEMAND = Demand(max_model_len=160, max_num_batched_tokens=64, max_num_seqs=8)
MIB, GIB = 2**20, 2**30


def size(cache, device, groups=GROUPS, reserved=0, shards=1):
    (num_blocks,) = size_kv_cache(cache, Division(groups, DEMAND, shards), DEMAND, reserved, device).num_blocks
    return num_blocks


def bytes_per_block(groups, shards):
    return Division(groups, DEMAND, shards).block_bytes


def test_layers_of_one_kind_share_a_group_and_unequal_kinds_get_groups_of_the_smaller_count():
    groups = group_layers([WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL])
    assert [(group.spec.window, group.layer_idxs) for group in groups] == [
        (None, (2, 5)),
        (100, (0, 1)),
        (100, (3, 4)),
    ]
    caches = KVCacheConfig((10,), groups).layer_caches()
    assert dict(enumerate(caches)) == {2: (0, 0), 5: (0, 1), 0: (1, 0), 1: (1, 1), 3: (2, 0), 4: (2, 1)}


def test_stages_have_layers_of_each_group_and_memory_for_no_others():
    groups = group_layers([WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL], is_staged=True)
    assert [group.layer_idxs for group in groups] == [(2, 5), (0, 3), (1, 4)]
    whole, stage = KVCacheConfig((10,), groups), KVCacheConfig((10,), groups_of_layers(groups, range(3, 6)))
    assert [group.layer_idxs for group in stage.groups] == [(2,), (0,), (1,)]
    assert stage.layer_caches() == ((1, 0), (2, 0), (0, 0)) and len(stage.tensors) == 1
    assert 2 * stage.num_bytes(1) == whole.num_bytes(1)
    assert [group.layer_idxs for group in groups_of_layers(groups, range(1))] == [(), (0,), ()]


def test_kinds_in_nearly_equal_numbers_share_few_groups_with_a_little_padding():
    assert len(group_layers([FULL] * 9 + [WINDOW] * 8)) == 2


def test_a_window_group_needs_blocks_for_the_window_and_a_step_only():
    assert max_blocks_per_request(GROUPS, 160, 64) == 10
    # 99 earlier tokens and 24 new ones: 8 blocks, and one more since neither end is on a border
    assert max_blocks_per_request(group_layers([WINDOW]), 160, 24) == 9
    assert max_blocks_per_request(group_layers([WINDOW]), 160, 64) == 10


LATENT = LatentSpec(block_size=32, width=576, dtype_bytes=2)
STATE = StateSpec(
    64, (StateArray((8, 16, 32), "float32"), StateArray((3, 8), "bfloat16", split_axis=1, token_axis=0)), num_drafts=4
)
MIXED = group_layers([STATE, STATE, FULL, STATE, LATENT, STATE, WINDOW, STATE, STATE])


def test_layers_that_store_alike_share_a_pool_and_others_do_not():
    kinds = [(type(group.spec).__name__, group.layer_idxs) for group in MIXED]
    assert kinds == [
        ("AttentionSpec", (2,)),
        ("LatentSpec", (4,)),
        ("AttentionSpec", (6,)),
        ("StateSpec", (0, 1, 3, 5, 7, 8)),
    ]
    cache = KVCacheConfig((10, 20, 30), MIXED)
    assert [pool.group_idxs for pool in cache.pools] == [(0, 2), (1,), (3,)]
    assert [n for _, n, _ in cache.tensors] == [10, 20, 30, 30, 30, 30, 30, 30]
    assert dict(enumerate(cache.layer_caches())) == {
        2: (0, 0),
        6: (2, 0),
        4: (1, 1),
        0: (3, 2),
        1: (3, 3),
        3: (3, 4),
        5: (3, 5),
        7: (3, 6),
        8: (3, 7),
    }


def test_blocks_of_equal_bytes_and_another_shape_have_a_pool_of_their_own():
    other = AttentionSpec(block_size=16, num_kv_heads=2, head_dim=128, dtype_bytes=2)
    assert other.block_bytes == FULL.block_bytes
    assert len(KVCacheConfig((2, 2), group_layers([FULL, other])).pools) == 2


@pytest.mark.parametrize("shards", [1, 4])
def test_pools_get_blocks_in_proportion_to_what_a_request_needs_of_each(shards):
    division = Division(MIXED, DEMAND, shards)
    # Keys and values of everything and of a window, latents, and snapshots; then their null blocks.
    needs = [10 + 10, 5, SNAPSHOTS_PER_REQUEST]
    sizes = [2 * 16 * 4 * 64 * 2 // shards, 32 * 576 * 2, 6 * (8 * 16 * 32 * 4 + 8 * 3 * 2) // shards]
    assert division.least_bytes == sum((need + 1) * size for need, size in zip(needs, sizes))
    assert division.num_blocks_in(division.least_bytes) == 1 + needs[0]
    assert division.num_blocks_in(division.least_bytes - 1) == needs[0]
    assert division.row_bytes == 6 * (8 * 16 * 32 * 4 + 8 * (3 + 4) * 2) // shards
    cache = size_kv_cache(CacheConfig(kv_cache_memory_bytes=9 * MIB), division, DEMAND, 0, FakeDevice("cpu"))
    assert cache.num_bytes(shards) <= 9 * MIB < cache.num_bytes(shards) + division.least_bytes
    requests = (cache.num_blocks[0] - 1) / needs[0]
    assert cache.num_blocks == tuple(1 + int(requests * need) for need in needs)
    assert cache.concurrency(160, 64) == pytest.approx(requests, abs=0.3)


@pytest.mark.parametrize("shards", [1, 4])
def test_snapshots_of_small_states_get_a_share_of_memory_and_limit_nothing(shards):
    small = StateSpec(16, (StateArray((2, 64), "bfloat16", split_axis=1, token_axis=0),))
    groups, demand = group_layers([small, FULL, small, small]), Demand(8192, 512, 8)
    division = Division(groups, demand, shards)
    cache = division.kv_cache(1 + 2 * 512)
    attended, snapshots = (n * pool.block_bytes(shards) for n, pool in zip(cache.num_blocks, cache.pools))
    assert snapshots == pytest.approx(attended / 16, rel=0.01)
    assert cache.num_blocks[1] > 2 * SNAPSHOTS_PER_REQUEST + 1
    assert cache.concurrency(8192, 512) == 2 and cache.concurrency(16, 512) == 1024


@pytest.mark.parametrize("spec", [FULL, WINDOW, LATENT, STATE])
def test_the_arrays_of_a_pool_take_the_bytes_that_are_counted(spec):
    context = AttentionContext(make_mesh(1), "reference")
    arrays = jax.tree.leaves(tensor_struct(context, spec, 7, jnp.bfloat16))
    assert sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays) == 7 * spec.block_bytes


def test_an_accelerator_gives_its_share_of_memory_less_what_is_reserved():
    device = FakeDevice("tpu", {"bytes_limit": 16 * GIB, "bytes_in_use": GIB})
    block = bytes_per_block(GROUPS, 1)
    assert block == 4 * 2 * 16 * 4 * 64 * 2
    assert size(CacheConfig(gpu_memory_utilization=0.5), device, reserved=2 * GIB) == 6 * GIB // block
    assert size(CacheConfig(gpu_memory_utilization=0.5), device) == 7 * GIB // block
    assert bytes_per_block(GROUPS, 4) == block // 4


@pytest.mark.parametrize(
    ("taken", "utilization", "usable"), [(None, 0.9, 12), (0.75, 0.5, 8), (0.9, 0.9, 14.4), (0.5, 1.0, 8)]
)
def test_a_gpu_gives_its_share_of_all_its_memory_though_it_reports_the_pool_of_jax(
    monkeypatch, taken, utilization, usable
):
    for variable in SHARE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    if taken:
        monkeypatch.setenv(SHARE_VARIABLES[0], str(taken))
    device = FakeDevice("gpu", {"bytes_limit": int(16 * GIB * (taken or 0.75)), "bytes_in_use": 0})
    blocks = size(CacheConfig(gpu_memory_utilization=utilization), device)
    assert blocks * bytes_per_block(GROUPS, 1) == pytest.approx(usable * GIB, rel=1e-4)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_that_does_not_tell_its_memory_is_not_taken_for_the_host(platform):
    with pytest.raises(ConfigError, match="does not tell how much memory it has"):
        size(CacheConfig(), FakeDevice(platform))
    assert size(CacheConfig(num_gpu_blocks_override=33), FakeDevice(platform)) == 33


def test_a_cpu_gets_no_more_blocks_than_its_requests_can_use():
    assert size(CacheConfig(), FakeDevice("cpu")) == 8 * 10 + 1


def test_what_else_runs_on_a_host_rarely_changes_the_budget_which_is_part_of_the_shapes():
    assert {host_budget(24 * GIB, free, GIB) for free in (4 * GIB, 13 * GIB + 12345, 23 * GIB)} == {2 * GIB}
    assert host_budget(24 * GIB, 4 * GIB - 1, 0) == GIB
    assert host_budget(16 * GIB, 15 * GIB, 0) == 2 * GIB
    assert host_budget(24 * GIB, 0, 0) == 0


def test_one_long_request_may_take_more_of_a_host_as_long_as_that_is_free():
    assert host_budget(24 * GIB, 12 * GIB, 5 * GIB) == 5 * GIB
    assert host_budget(24 * GIB, 8 * GIB, 5 * GIB) < 5 * GIB


def test_an_explicit_number_or_size_wins():
    assert size(CacheConfig(num_gpu_blocks_override=33), FakeDevice("cpu")) == 33
    assert size(CacheConfig(kv_cache_memory_bytes=50 * bytes_per_block(GROUPS, 1)), FakeDevice("cpu")) == 50


def test_a_cache_that_cannot_hold_one_request_is_refused_with_the_numbers():
    with pytest.raises(CapacityError, match=r"max_model_len = 160 tokens needs 10 KV blocks .* gives 10\."):
        size(CacheConfig(num_gpu_blocks_override=10), FakeDevice("cpu"))


def test_the_host_says_how_much_memory_is_left():
    assert 2**20 < available_host_bytes() < 2**50


@pytest.mark.parametrize("device", [FakeDevice("cpu"), FakeDevice("tpu", {"bytes_limit": 16 * GIB})])
@pytest.mark.parametrize("option", ["num_gpu_blocks_override", "kv_cache_memory_bytes"])
def test_blocks_for_which_there_is_no_memory_are_refused_before_anything_is_filled(device, option):
    with pytest.raises(CapacityError, match=rf"{option} asks for .* GiB are free beside 1\.00 GiB .* Lower it"):
        size(CacheConfig(**{option: 2**50}), device, reserved=GIB)
    few = {"num_gpu_blocks_override": 32, "kv_cache_memory_bytes": 32 * bytes_per_block(GROUPS, 1)}[option]
    assert size(CacheConfig(**{option: few}), device, reserved=MIB) == 32


def test_memory_that_xla_cannot_have_is_a_lack_of_capacity_and_other_errors_stay_what_they_are():
    words = r"^there is no memory for the weights: RESOURCE_EXHAUSTED: 9 GiB\. Buy\.$"
    with pytest.raises(CapacityError, match=words), memory_for("weights", "Buy."):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GiB.\nmore")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_for("weights", "Buy."):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
