"""Letters to mesh axes, and sizes of axes that are split."""

import pytest
from jax.sharding import PartitionSpec

from jaxpaged.errors import ConfigError
from jaxpaged.params.sharding import device_sizes, kv_heads_on_devices, partition_spec

SIZES = {"D": 48, "N": 8, "K": 2, "H": 12, "F": 80, "V": 211}


def test_heads_feed_forward_and_vocabulary_are_split_and_the_width_is_not():
    assert partition_spec("NHD") == PartitionSpec("model", None, None)
    assert partition_spec("DF") == PartitionSpec(None, "model")
    assert partition_spec("VD") == PartitionSpec("model", None)
    assert partition_spec("D") == PartitionSpec(None)


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
