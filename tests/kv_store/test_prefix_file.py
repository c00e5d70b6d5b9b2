"""A beginning as one file: what is written is read, by safetensors too, and nothing else is."""

import dataclasses

import numpy as np
import pytest
import safetensors.numpy

from jaxpaged.errors import PageError, UsageError
from jaxpaged.kv_store.page import SCALED, PageContent, PageKey, decode, scales_of
from jaxpaged.kv_store.prefix_file import PlacedPage, PrefixFile, PrefixHeader, write_prefix
from tests.kv_store.pages import SPACE

SHAPES = ((2, 2, 4, 1, 8), (2, 2, 4, 1, 8), (1, 2, 4, 1, 8))
TOKENS = (5, 6, 7, 8, 9, 10, 11, 12)
VALUES = [np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + i for i, shape in enumerate(SHAPES)]


def placed(number, group, first):
    parent = bytes([number - 1]) * 32 if first else None
    return PlacedPage(PageContent(PageKey(bytes([number]) * 32, group), parent, TOKENS[first : first + 4]), first)


def written(path, secret=None, tokens=TOKENS):
    pages = (placed(1, 0, 0), placed(2, 0, 4), placed(2, 1, 4))
    header = PrefixHeader(SPACE, "demo", tokens, "float32", pages, SHAPES)
    return write_prefix(path, header, ([each] for each in VALUES), secret)


def test_pages_of_8_bits_keep_their_scales(tmp_path):
    path, pages = tmp_path / "x.safetensors", (placed(1, 0, 0), placed(2, 1, 4))
    arrays = [
        (np.full(shape, number, np.int8), np.full(shape[:-1], number / 10, np.float32))
        for number, shape in enumerate(SHAPES[1:], 1)
    ]
    header = PrefixHeader(SPACE, "demo", TOKENS, "int8", pages, SHAPES[1:], is_scaled=True)
    info = write_prefix(path, header, arrays, None)
    assert info.num_bytes == sum(values.nbytes + scales.nbytes for values, scales in arrays)
    for (key, buffers), (values, scales) in zip(PrefixFile(path).pages(), arrays, strict=True):
        whole = b"".join(map(bytes, buffers))
        said, found = decode(whole, expect_namespace=SPACE, key=key, version=SCALED)
        assert np.array_equal(found, values) and np.array_equal(scales_of(whole, said), scales)
    tensors = safetensors.numpy.load_file(path)
    assert np.array_equal(tensors["g1.t4.scales"], arrays[1][1]) and len(tensors) == 4
    whole = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(whole[:8], "little")
    whole[start + 1] ^= 1  # in the first scale
    path.write_bytes(whole)
    with pytest.raises(PageError, match="page at token 0"):
        list(PrefixFile(path).pages())
    write_prefix(path, dataclasses.replace(header, dtype="float32"), arrays, None)
    with pytest.raises(PageError, match="another shape or type"):
        PrefixFile(path)


@pytest.mark.parametrize("secret", [None, b"sixteen letters."])
def test_what_is_written_is_read(tmp_path, secret):
    path = tmp_path / "x.safetensors"
    info = written(path, secret)
    assert info[:4] == (SPACE, "demo", 8, 3) and info.num_bytes == sum(value.nbytes for value in VALUES)
    file = PrefixFile(path, secret)
    assert file.header.token_ids == TOKENS and [page.first for page in file.header.pages] == [0, 4, 4]
    for (key, buffers), page, expected in zip(file.pages(), file.header.pages, VALUES, strict=True):
        content = page.content
        whole = b"".join(map(bytes, buffers))
        header, values = decode(
            whole, expect_namespace=SPACE, key=content.key, token_ids=content.token_ids, secret=secret
        )
        assert key == content.key and header.parent == content.parent and np.array_equal(values, expected)
    tensors = safetensors.numpy.load_file(path)
    assert np.array_equal(tensors["g1.t4"], VALUES[2]) and len(tensors) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_what_is_damaged_cut_off_or_signed_otherwise_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    written(path)
    whole = path.read_bytes()
    for place, words in ((len(whole) - 3, "page at token 4"), (200, "header is damaged")):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(PageError, match=words):
            list(PrefixFile(path).pages())
    for content, words in ((whole[:-1], "its header says"), (whole[:300], "cut off"), (b"{}" * 40, "no file")):
        path.write_bytes(content)
        with pytest.raises(PageError, match=words):
            PrefixFile(path)
    path.write_bytes(whole)
    with pytest.raises(PageError, match="another secret"):
        PrefixFile(path, b"sixteen letters.")
    written(path, b"sixteen letters.")
    with pytest.raises(PageError, match="signed with a secret"):
        PrefixFile(path)
    written(path, tokens=TOKENS[:6])
    with pytest.raises(PageError, match="reaches beyond the 6 tokens"):
        PrefixFile(path)


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        PrefixFile(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="cannot be read"):
        PrefixFile(tmp_path / "empty")
    with pytest.raises(UsageError, match="cannot be written"):
        written(tmp_path / "no" / "x")


def test_a_failure_leaves_no_file(tmp_path):
    path, pages = tmp_path / "x", (placed(1, 0, 0),)

    def values():
        raise RuntimeError("the device is gone")
        yield

    with pytest.raises(RuntimeError):
        write_prefix(path, PrefixHeader(SPACE, "demo", TOKENS[:4], "float32", pages, SHAPES[:1]), values(), None)
    assert not list(tmp_path.iterdir())


def test_another_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxpaged.kv_store.prefix_file.VERSION", 3)
    written(tmp_path / "x")
    monkeypatch.undo()
    with pytest.raises(PageError, match="version '3'"):
        PrefixFile(tmp_path / "x")
