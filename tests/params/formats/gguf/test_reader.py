"""What a GGUF file says is read as it is, and checked before anything is taken for it."""

import struct

import numpy as np
import pytest

from jaxpaged.params.formats.gguf.reader import mapped_rows, read_gguf
from tests.params.formats.gguf.writer import text, write_gguf

FACTS = {"general.architecture": "llama", "llama.block_count": 2, "a.flag": True, "a.number": 1.5}
LISTS = {"a.words": ["one", "two"], "a.numbers": np.array([1, 2, 3], np.int32)}
ROWS = np.arange(36, dtype=np.uint8).reshape(2, 18)
TENSORS = {"a.weight": np.ones((3, 4), np.float32), "b.weight": ("Q4_0", ROWS), "norm": np.arange(5, dtype=np.float16)}


def test_facts_and_tensors_are_read(tmp_path):
    header = read_gguf(write_gguf(tmp_path / "a.gguf", FACTS | LISTS, TENSORS))
    assert {name: header.facts[name] for name in FACTS} == FACTS
    assert header.facts["a.words"] == ["one", "two"]
    assert list(header.facts["a.numbers"]) == [1, 2, 3]
    assert {name: (tensor.type.name, tensor.shape) for name, tensor in header.tensors.items()} == {
        "a.weight": ("F32", (3, 4)),
        "b.weight": ("Q4_0", (2, 32)),
        "norm": ("F16", (5,)),
    }
    with mapped_rows(header.tensors["b.weight"]) as rows:
        np.testing.assert_array_equal(rows, ROWS)


def split(folder, count=2, numbers=(0, 1), tensors_of=(("a.weight",), ("b.weight", "norm")), total=3):
    for i in range(count):
        facts = {"split.no": numbers[i], "split.count": count, "split.tensors.count": total}
        own = {name: TENSORS[name] for name in tensors_of[i]}
        write_gguf(folder / f"a-{i + 1:05}-of-{count:05}.gguf", facts | (FACTS if i == 0 else {}), own)
    return folder / f"a-00001-of-{count:05}.gguf"


def test_parts_of_a_split_model_are_one(tmp_path):
    first = split(tmp_path)
    header = read_gguf(first)
    assert header.tensors.keys() == TENSORS.keys() and len(header.paths) == 2
    assert read_gguf(header.paths[1]) == header
    with mapped_rows(header.tensors["b.weight"]) as rows:
        np.testing.assert_array_equal(rows, ROWS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"numbers": (1, 0)}, "another part"),
        ({"tensors_of": (("a.weight",), ("a.weight", "norm"))}, "a.weight, and so does an earlier"),
        ({"total": 4}, "3 tensors of 4"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        read_gguf(split(tmp_path, **changes))


def test_a_missing_part_is_named(tmp_path):
    split(tmp_path).unlink()
    with pytest.raises(ValueError, match="1 of 2 parts.*a-00001-of-00002.gguf"):
        read_gguf(tmp_path / "a-00002-of-00002.gguf")


def test_a_part_with_another_name_is_refused(tmp_path):
    part = split(tmp_path).rename(tmp_path / "b.gguf")
    with pytest.raises(ValueError, match="its name does not say which"):
        read_gguf(part)


HUGE = 2**63


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"a": struct.pack("<I", 99)}, "unknown kind 99"),
        ({"a": struct.pack("<IQ", 8, HUGE)}, f"{HUGE} bytes are expected"),
        ({"a": struct.pack("<IIQ", 9, 8, HUGE)}, f"{HUGE} elements"),
        ({"a": struct.pack("<IIQ", 9, 0, HUGE)}, f"{HUGE} elements"),
        ({"a": struct.pack("<IIQ", 9, 8, 2**20)}, "no room for 1048576 elements"),
        ({"a": struct.pack("<IIQ", 9, 12, 2**20)}, "8388608 bytes are expected"),
        ({"a": struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 1) + b"a"}, "arrays inside of arrays"),
        ({"general.alignment": 24}, "general.alignment is 24"),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"general.alignment": "no"}, "general.alignment is 'no'"),
    ],
)
def test_hostile_facts_are_refused(tmp_path, facts, words):
    with pytest.raises(ValueError, match=words):
        read_gguf(write_gguf(tmp_path / "a.gguf", facts, TENSORS))


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ({"b.weight": 0}, "a.weight and b.weight overlap"),
        ({"b.weight": 7}, "tensor b.weight ends"),
        ({"norm": 2**40}, "tensor norm ends at byte"),
        ({"norm": HUGE}, "tensor norm ends at byte"),
    ],
)
def test_tensors_lie_in_the_file_and_beside_each_other(tmp_path, offsets, words):
    with pytest.raises(ValueError, match=words):
        read_gguf(write_gguf(tmp_path / "a.gguf", FACTS, TENSORS, offsets))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (struct.pack("<IIQ", 0, 0, 0), "has 0 axes"),
        (struct.pack("<IIQ", 2**31, 0, 0), "has 2147483648 axes"),
        (struct.pack("<I2QIQ", 2, 0, 4, 0, 0), "has the shape \\(4, 0\\)"),
        (struct.pack("<I2QIQ", 2, HUGE, HUGE, 0, 0), "has the shape"),
        (struct.pack("<I2QIQ", 2, 33, 4, 2, 0), "Q4_0 has the shape \\(4, 33\\)"),
        (struct.pack("<I2QIQ", 2, 4, 4, 1000, 0), "unknown type 1000"),
    ],
)
def test_hostile_tensors_are_refused(tmp_path, tensor, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t") + tensor + bytes(64))
    with pytest.raises(ValueError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"GGUF", "too short"),
        (b"GGML" + bytes(60), "no GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(60), "version 1 "),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(60), "other byte order"),
        (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0) + bytes(60), f"no room for {HUGE} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE) + bytes(60), f"no room for {HUGE} facts"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + struct.pack("<IB", 0, 1)) + bytes(60),
            "'a' is there",
        ),
    ],
)
def test_what_is_no_header_is_refused(tmp_path, start, words):
    path = tmp_path / "a.gguf"
    path.write_bytes(start)
    with pytest.raises(ValueError, match=words):
        read_gguf(path)


def test_every_shorter_file_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "a.gguf", FACTS | LISTS, TENSORS).read_bytes()
    for length in range(0, len(whole), 7):
        (tmp_path / "b.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="b.gguf"):
            read_gguf(tmp_path / "b.gguf")
