"""Pages of all groups make up a chunk, and every number is where LMCache has it."""

import numpy as np
import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from tests.kv_store.lmcache.chunked import BF16, PAGE, layout_of, values_of

TOKENS = list(range(100, 116))


def written(layout):
    values, chunk = values_of(TOKENS, layout), layout.empty()
    for g, layers in enumerate(layout.groups):
        for start in range(0, 16, PAGE):
            page = values[list(layers), :, start : start + PAGE]
            layout.write_page(chunk, g, start, page)
    return values, chunk


def test_a_chunk_is_keys_then_values_by_layer_token_and_head():
    layout = layout_of()
    values, chunk = written(layout)
    expected = values.transpose(1, 0, 2, 3, 4).reshape(2, 3, 16, 8)
    assert chunk.dtype == BF16 and chunk.shape == layout.shape
    assert np.array_equal(chunk.view(np.uint16), expected.view(np.uint16))
    for g, layers in enumerate(layout.groups):
        for start in range(0, 16, PAGE):
            page = values[list(layers), :, start : start + PAGE]
            assert np.array_equal(layout.read_page(chunk, g, start).view(np.uint16), page.view(np.uint16))


@pytest.mark.parametrize(("num_parts", "heads"), [(2, [[0, 1], [2, 3]]), (8, [[i // 2] for i in range(8)])])
def test_devices_have_their_own_heads_and_copies_where_these_are_fewer(num_parts, heads):
    layout = layout_of(num_parts=num_parts)
    values, chunk = written(layout)
    parts = layout.parts(chunk)
    for part, own_heads in zip(parts, heads, strict=True):
        own = values[:, :, :, own_heads].transpose(1, 0, 2, 3, 4).reshape(layout.part_shape)
        assert part.flags.c_contiguous and np.array_equal(part.view(np.uint16), own.view(np.uint16))
    assert np.array_equal(layout.joined(parts).view(np.uint16), chunk.view(np.uint16))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"chunk_tokens": 18}, "chunk_size is 18 tokens, and pages have 4"),
        ({"num_layers": 4}, "every layer once"),
        ({"groups": ((0, 1, 2), (1,))}, "every layer once"),
        ({"dtype": np.dtype(np.int8)}, "the KV cache has int8"),
        ({"num_parts": 3}, "world_size is 3, and the model has 4 KV heads"),
    ],
)
def test_what_has_no_place_in_a_chunk_is_refused_by_name(changes, said):
    facts = {**vars(layout_of()), **changes}
    with pytest.raises(ConfigError, match=said):
        ChunkLayout(**facts)
