"""Pages of all groups make up a chunk, and every number is where LMCache has it."""

from dataclasses import replace

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
            found, scales = layout.read_page(chunk, g, start)
            assert np.array_equal(found.view(np.uint16), page.view(np.uint16)) and scales is None


def test_the_scale_of_a_token_and_head_is_behind_its_numbers():
    layout = replace(layout_of(num_parts=2), dtype=np.dtype(np.int8), has_scales=True)
    rng, chunk = np.random.default_rng(0), layout.empty()
    values = rng.integers(-127, 128, (3, 2, 16, 4, 2)).astype(np.int8)
    scales = rng.uniform(size=values.shape[:-1]).astype("<f4")
    for g, layers in enumerate(layout.groups):
        for start in range(0, 16, PAGE):
            place = np.s_[list(layers), :, start : start + PAGE]
            layout.write_page(chunk, g, start, values[place], scales[place])
    expected = np.concatenate([values.view(np.uint8), scales[..., None].view(np.uint8)], axis=-1)
    assert chunk.dtype == np.uint8 and chunk.shape == layout.shape == (2, 3, 16, 4 * (2 + 4))
    assert np.array_equal(chunk, expected.transpose(1, 0, 2, 3, 4).reshape(layout.shape))
    assert np.array_equal(layout.joined(layout.parts(chunk)), chunk)
    found = layout.read_page(chunk, 0, 2 * PAGE)
    place = np.s_[[0, 2], :, 2 * PAGE : 3 * PAGE]
    assert found[0].dtype == np.int8 and found[1].dtype == np.float32
    assert np.array_equal(found[0], values[place]) and np.array_equal(found[1], scales[place])


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
        ({"dtype": np.dtype(np.float64)}, "the KV cache has float64"),
        ({"num_parts": 3}, "world_size is 3, and the model has 4 KV heads"),
    ],
)
def test_what_has_no_place_in_a_chunk_is_refused_by_name(changes, said):
    facts = {**vars(layout_of()), **changes}
    with pytest.raises(ConfigError, match=said):
        ChunkLayout(**facts)
