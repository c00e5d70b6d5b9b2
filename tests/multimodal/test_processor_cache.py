"""Processed pictures by digest within a number of bytes, and names of clients that stand for their bytes only."""

import numpy as np
import pytest

from jaxpaged.errors import RequestError
from jaxpaged.multimodal.processes import KeyedPicture
from jaxpaged.multimodal.processor_cache import ProcessorCache, item_digest
from jaxpaged.multimodal.processors.base import PictureLayout


def item(num_bytes=10):
    return KeyedPicture(b"key", PictureLayout(1, 1, 1, (num_bytes,), "x"), np.zeros(num_bytes, np.uint8))


def test_the_item_that_was_used_longest_ago_goes_first():
    cache = ProcessorCache(30)
    for name in (b"a", b"b", b"c"):
        cache.put(name, item())
    assert cache.get(b"a") is not None
    cache.put(b"d", item())
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.find(b"key") is not None and cache.find(b"other") is None
    assert (cache.num_bytes, cache.queries, cache.hits) == (30, 5, 4), "looking at a picture is no use of it"
    cache.put(b"large", item(31))
    assert len(cache) == 3 and cache.get(b"large") is None
    cache.evict(11)
    assert len(cache) == 1 and cache.get(b"d") is not None


def test_a_cache_without_room_keeps_nothing():
    cache = ProcessorCache(0)
    cache.put(b"a", item())
    assert len(cache) == 0


def test_other_options_are_another_item():
    assert item_digest(b"s", {"size": [1, 2]}) != item_digest(b"s", {"size": [1, 3]})
    assert item_digest(b"s", {"size": [1, 2]}) == item_digest(b"s", {"size": [1, 2]})


def test_a_name_stands_for_its_first_bytes_for_its_salt_alone():
    cache = ProcessorCache(100)
    cache.bind("cat", None, b"bytes", "image")
    cache.bind("cat", None, b"bytes", "image")
    cache.bind("cat", "salt", b"other bytes", "image")
    assert (cache.named("cat", None), cache.named("cat", "salt")) == (b"bytes", b"other bytes")
    assert cache.named("cat", "another") is None and cache.named("dog", None) is None
    with pytest.raises(RequestError, match="^image has the uuid 'cat', under which another picture") as caught:
        cache.bind("cat", None, b"other bytes", "image")
    assert caught.value.parameter == "image"
    assert cache.named("cat", None) == b"bytes"
