"""Letters to mesh axes, and sizes of axes that are split."""

import pytest
from jax.sharding import PartitionSpec

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.params.sharding import MODEL_AXES, device_sizes, kv_heads_on_devices, partition_spec, sizes_on

SIZES = {"D": 48, "N": 8, "K": 2, "H": 12, "F": 80, "V": 211}


def test_heads_feed_forward_and_vocabulary_are_split_and_the_width_is_not():
    assert partition_spec("NHD") == PartitionSpec(MODEL_AXES, None, None)
    assert partition_spec("DF") == PartitionSpec(None, MODEL_AXES)
    assert partition_spec("VD") == PartitionSpec(MODEL_AXES, None)
    assert partition_spec("D") == PartitionSpec(None)


def test_experts_are_spread_over_one_axis_and_split_over_the_other():
    assert partition_spec("eQD") == PartitionSpec("expert", "tensor", None)
    assert partition_spec("ED") == PartitionSpec(None, None)  # what chooses them is whole
    sizes = {**SIZES, "E": 6, "e": 6, "Q": 20}
    assert sizes_on(make_mesh(8, spreads_experts=True), sizes) == {**sizes, "K": 8, "V": 216, "e": 8}
    assert sizes_on(make_mesh(4), sizes) == {**sizes, "K": 4, "V": 212}
    with pytest.raises(ConfigError, match=r"8 does not divide the model.s 20 columns .*enable_expert_parallel"):
        sizes_on(make_mesh(8), sizes)


@pytest.mark.parametrize(("heads", "shards", "expected"), [(8, 1, 8), (8, 4, 8), (2, 8, 8), (1, 4, 4), (4, 4, 4)])
def test_every_device_has_at_least_one_key_head(heads, shards, expected):
    assert kv_heads_on_devices(heads, shards) == expected


def test_key_heads_that_fit_no_way_are_an_error():
    with pytest.raises(ConfigError, match="6 and the model's 4 key-value heads"):
        kv_heads_on_devices(4, 6)


def test_the_vocabulary_is_padded_to_a_multiple():
    assert device_sizes(SIZES, 8) == {**SIZES, "K": 8, "V": 216}
    assert device_sizes(SIZES, 1) == SIZES


@pytest.mark.parametrize(("letter", "size", "words"), [("F", 84, "84 feed-forward"), ("N", 12, "12 attention heads")])
def test_heads_and_feed_forward_must_divide(letter, size, words):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size 8 does not divide the model's {words}"):
        device_sizes({**SIZES, letter: size}, 8)
