"""A small model's chunks for tests: two groups of layers, pages of 4 tokens, chunks of 16."""

import hashlib

import ml_dtypes
import numpy as np

from jaxpaged.kv_store.lmcache.layout import ChunkLayout
from jaxpaged.kv_store.page import PageHeader, PageKey, encode, namespace

SPACE = namespace(weights="v1", dtype="bfloat16")
BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = "org/model"
PAGE = 4


def layout_of(num_parts=1, dtype=BF16, chunk_tokens=16):
    return ChunkLayout(3, 4, 2, dtype, chunk_tokens, ((0, 2), (1,)), PAGE, num_parts=num_parts)


def hashes_of(token_ids):
    """As an engine's: each covers all before."""
    parent, hashes = b"", []
    for start in range(0, len(token_ids) - PAGE + 1, PAGE):
        parent = hashlib.sha256(parent + bytes(str(token_ids[start : start + PAGE]), "ascii")).digest()
        hashes.append(parent)
    return hashes


def values_of(token_ids, layout):
    """What a model computes: [layers, 2, tokens, heads, head dim], each row by all tokens up to it."""
    rows = [np.random.default_rng(token_ids[: i + 1]) for i in range(len(token_ids))]
    shape = (layout.num_layers, 2, layout.num_heads, layout.head_dim)
    return np.stack([row.normal(size=shape) for row in rows], axis=2).astype(layout.dtype)


def pages_of(token_ids, layout, space=SPACE):
    """(key, pieces) of all full pages of all groups, as an engine puts them."""
    values, hashes = values_of(token_ids, layout), hashes_of(token_ids)
    pages = {}
    for g, layers in enumerate(layout.groups):
        for idx, own in enumerate(hashes):
            key, place = PageKey(own, g), slice(idx * PAGE, (idx + 1) * PAGE)
            header = PageHeader(space, key, hashes[idx - 1] if idx else None, tuple(token_ids[place]))
            own_values = values[list(layers), :, place]
            scales = np.arange(own_values[..., 0].size, dtype=np.float32) if layout.has_scales else None
            pages[key] = encode(
                header, own_values, scales=None if scales is None else scales.reshape(own_values.shape[:-1])
            )
    return pages
