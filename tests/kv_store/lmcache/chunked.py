"""A small model's chunks for tests: two groups of layers, blocks of 4 and of 8 tokens, chunks of 16."""

import hashlib

import ml_dtypes
import numpy as np

from jaxpaged.kv_store.lmcache.layout import ChunkLayout, GroupPlace
from jaxpaged.kv_store.page import PageHeader, PageKey, encode, namespace

SPACE = namespace(weights="v1", dtype="bfloat16")
BF16 = np.dtype(ml_dtypes.bfloat16)
MODEL = "org/model"


def layout_of(num_parts=1, dtype=BF16, chunk_tokens=16):
    groups = (GroupPlace((0, 2), 4), GroupPlace((1,), 8))
    return ChunkLayout(3, 4, 2, dtype, chunk_tokens, groups, unit=4, num_parts=num_parts)


def hashes_of(token_ids, unit=4):
    """As an engine's: each covers all before."""
    parent, hashes = b"", []
    for start in range(0, len(token_ids) - unit + 1, unit):
        parent = hashlib.sha256(parent + bytes(str(token_ids[start : start + unit]), "ascii")).digest()
        hashes.append(parent)
    return hashes


def values_of(token_ids, layout):
    """What a model computes: [layers, 2, tokens, heads, head dim], each row by all tokens up to it."""
    rows = [np.random.default_rng(token_ids[: i + 1]) for i in range(len(token_ids))]
    shape = (layout.num_layers, 2, layout.num_heads, layout.head_dim)
    return np.stack([row.normal(size=shape) for row in rows], axis=2).astype(layout.dtype)


def pages_of(token_ids, layout, space=SPACE):
    """(key, pieces) of all full blocks of all groups, as an engine puts them."""
    values, hashes = values_of(token_ids, layout), hashes_of(token_ids)
    pages = {}
    for g, group in enumerate(layout.groups):
        size = group.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = PageKey(hashes[(start + size) // 4 - 1], g)
            parent = hashes[start // 4 - 1] if start else None
            header = PageHeader(space, key, parent, tuple(token_ids[start : start + size]))
            pages[key] = encode(header, values[list(group.layer_idxs), :, start : start + size])
    return pages
