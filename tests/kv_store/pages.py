"""Small pages for tests: a few hundred bytes of payload, whose content follows from a number."""

import ml_dtypes
import numpy as np

from jaxpaged.kv_store.page import PageHeader, PageKey, encode, namespace

SPACE = namespace(weights="v1", dtype="bfloat16")


def key_of(number, group=0):
    return PageKey(number.to_bytes(32, "big"), group)


def values_of(number, layers=2, dtype=ml_dtypes.bfloat16, head_dim=8):
    return np.random.default_rng(number).normal(size=(layers, 2, 4, 2, head_dim)).astype(dtype)


def scaled_page_of(number, secret=None):
    """Values of 8 bits with scales: (key, values, scales, the bytes of the page)."""
    values = np.random.default_rng(number).integers(-127, 128, (2, 2, 4, 2, 8), np.int8)
    scales = np.random.default_rng(number).random(values.shape[:-1], np.float32)
    header = PageHeader(SPACE, key_of(number), None, (number, 7, 8, 9))
    return header.key, values, scales, b"".join(map(bytes, encode(header, values, secret, scales)))


def page_of(number, secret=None, space=SPACE, group=0, **shape):
    """(key, pieces of the page, its bytes)."""
    key = key_of(number, group)
    header = PageHeader(space, key, key_of(number + 1000).block_hash, (number, 7, 8, 9))
    pieces = encode(header, values_of(number, **shape), secret)
    return key, pieces, b"".join(map(bytes, pieces))
