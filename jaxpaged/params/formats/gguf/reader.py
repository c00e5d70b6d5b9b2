"""Reads the header of a GGUF file: facts by name, and where every tensor lies.

The format (versions 2 and 3, little endian): "GGUF", the version, how many tensors and facts there are, the facts, the
tensors, then the data at a multiple of `general.alignment`. Whatever the header claims is checked against the file
before memory is taken for it. Knows neither models nor devices, and raises ValueError: the caller knows the words.
"""

import itertools
import math
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.params.formats.gguf.types import TYPES, TensorType

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = "general.alignment"
MAX_ELEMENTS = 2**24
"""Of one array: 32 times the pieces of the largest vocabularies."""
MAX_DIMS = 4
MIN_FACT_BYTES, MIN_TENSOR_BYTES = 13, 32
"""The least that one of them takes in a header."""

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""The kinds of facts that have one size -> how they lie in the file."""
STRING, ARRAY, BOOL, FLOAT = 8, 9, 7, 6

SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in a file. `shape` has the fastest axis last, unlike the file."""

    path: Path
    name: str
    type: TensorType
    shape: tuple[int, ...]
    begin: int

    @property
    def row_bytes(self) -> int:
        """Of a row along the last axis, which is whole blocks."""
        return self.shape[-1] // self.type.block * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """What a file, or all parts of a split one, says. `facts` are bool, int, float, str, lists of str, or arrays."""

    facts: dict[str, Any]
    tensors: dict[str, GgufTensor]
    paths: tuple[Path, ...]


def read_gguf(path: Path) -> GgufHeader:
    """The header of a model. The parts of a split one lie side by side; any of them stands for all.

    Raises ValueError for files that are no GGUF, damaged, or incomplete, and OSError.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    if not match or int(match[3]) < 2:
        header = read_part(path)
        if header.facts.get("split.count", 1) > 1:
            raise ValueError(f"{path} is part of a split model, but its name does not say which. Give it its own name")
        return header
    count = int(match[3])
    paths = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.exists()]:
        raise ValueError(f"{len(missing)} of {count} parts of the model are missing, first {missing[0]}. Download them")
    parts = [read_part(part) for part in paths]
    tensors: dict[str, GgufTensor] = {}
    for i, part in enumerate(parts):
        if (part.facts.get("split.no"), part.facts.get("split.count")) != (i, count):
            raise ValueError(f"{paths[i]} says that it is another part than its name does. Download it again")
        if twice := tensors.keys() & part.tensors.keys():
            raise ValueError(f"{paths[i]} holds {min(twice)}, and so does an earlier part. Download the model again")
        tensors |= part.tensors
    expected = parts[0].facts.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ValueError(f"the parts of {paths[0]} hold {len(tensors)} tensors of {expected}. Download the model again")
    return GgufHeader(parts[0].facts, tensors, tuple(paths))


def read_part(path: Path) -> GgufHeader:
    """The header of one file. Raises what `read_gguf` does."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 24:
            raise ValueError(f"{path} is too short for a GGUF file ({size} bytes)")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with memory:
        return _Parser(path, memory).header()


class _Parser:
    """Goes through a header. Every read is checked against the end of the file."""

    def __init__(self, path: Path, memory: mmap.mmap):
        self._path, self._memory, self._at = path, memory, 0

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._wrong("is no GGUF file: it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            hint = "; it was written for machines of the other byte order" if version % 2**16 == 0 else ""
            raise self._wrong(f"has version {version} of the format{hint}. Versions 2 and 3 are read")
        num_tensors, num_facts = self._number("<Q"), self._number("<Q")
        self._check_count("facts", num_facts, MIN_FACT_BYTES)
        self._check_count("tensors", num_tensors, MIN_TENSOR_BYTES)
        facts = self._once_each("fact", (self._fact() for _ in range(num_facts)))
        tensors = self._once_each("tensor", (self._tensor() for _ in range(num_tensors)))
        alignment = facts.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"says {ALIGNMENT} is {alignment!r}, which is no power of two")
        start = -(-self._at // alignment) * alignment
        placed = {name: self._placed(tensor, start, alignment) for name, tensor in tensors.items()}
        self._check_overlap(placed)
        return GgufHeader(facts, placed, (self._path,))

    def _placed(self, tensor: GgufTensor, start: int, alignment: int) -> GgufTensor:
        if tensor.begin % alignment or start + tensor.begin + tensor.num_bytes > len(self._memory):
            end = start + tensor.begin + tensor.num_bytes
            raise self._wrong(f"is truncated or damaged: tensor {tensor.name} ends at byte {end}")
        return GgufTensor(tensor.path, tensor.name, tensor.type, tensor.shape, start + tensor.begin)

    def _check_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.begin)
        for before, after in itertools.pairwise(in_order):
            if before.begin + before.num_bytes > after.begin:
                raise self._wrong(f"is damaged: tensors {before.name} and {after.name} overlap")

    def _fact(self) -> tuple[str, Any]:
        name = self._string()
        return name, self._value(self._number("<I"), name)

    def _value(self, kind: int, name: str) -> Any:
        if kind in SCALARS:
            number = self._number(SCALARS[kind])
            return shortest(number) if kind == FLOAT else number
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array(name)
        raise self._wrong(f"is damaged: the fact {name!r} has the unknown kind {kind}")

    def _array(self, name: str) -> list[str] | np.ndarray:
        kind, count = self._number("<I"), self._number("<Q")
        if count > MAX_ELEMENTS:
            raise self._wrong(f"has {count} elements in {name!r}; at most {MAX_ELEMENTS} are read")
        if kind == STRING:
            self._check_count(f"elements of {name!r}", count, 8)
            return [self._string() for _ in range(count)]
        if kind not in SCALARS:
            raise self._wrong(f"holds {name!r}, an array of kind {kind}; arrays inside of arrays are not read")
        dtype = np.dtype("?" if kind == BOOL else SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).copy()

    def _tensor(self) -> tuple[str, GgufTensor]:
        name, num_dims = self._string(), self._number("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._wrong(f"is damaged: tensor {name} has {num_dims} axes")
        shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
        kind, begin = self._number("<I"), self._number("<Q")
        if kind not in TYPES:
            raise self._wrong(f"holds {name} of the unknown type {kind}")
        found = TYPES[kind]
        if min(shape) < 1 or math.prod(shape) >= 2**63 or shape[-1] % found.block:
            raise self._wrong(f"is damaged: tensor {name} of type {found.name} has the shape {shape}")
        return name, GgufTensor(self._path, name, found, shape, begin)

    def _once_each(self, what: str, pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise self._wrong(f"is damaged: the {what} {name!r} is there twice")
            found[name] = value
        return found

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > len(self._memory) - self._at:
            raise self._wrong(f"is truncated or damaged: it has no room for {count} {what}")

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8", errors="replace")

    def _take(self, count: int) -> bytes:
        if count > len(self._memory) - self._at:
            raise self._wrong(f"is truncated or damaged: {count} bytes are expected at byte {self._at}")
        self._at += count
        return self._memory[self._at - count : self._at]

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{self._path} {what}")


def shortest(number: float) -> float:
    """A float32 as somebody wrote it: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


@contextmanager
def mapped_rows(tensor: GgufTensor) -> Iterator[np.ndarray]:
    """The tensor's bytes [rows, row_bytes], a read-only view of the file that lives as long as the block."""
    start = tensor.begin - tensor.begin % mmap.ALLOCATIONGRANULARITY
    with tensor.path.open("rb") as file:
        length = tensor.begin - start + tensor.num_bytes
        memory = mmap.mmap(file.fileno(), length, offset=start, access=mmap.ACCESS_READ)
    yield np.frombuffer(memory, np.uint8)[tensor.begin - start :].reshape(-1, tensor.row_bytes)
