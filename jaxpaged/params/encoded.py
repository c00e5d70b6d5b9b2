"""Weights that a checkpoint keeps in few bits: which parameters are so, the tensors of each, and their numbers.

A quantization (`schemes`) names modules, a spec names a tensor: `encoded_specs` brings the two together. What is read
of an encoded weight is read some rows at a time, from the file to what a device is given, and no tensor is decoded that
is not being placed. Knows letters and files, and no models.

Letters: I inputs and O outputs of a matrix, R some of the outputs.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxpaged.errors import CheckpointError
from jaxpaged.params.formats.stored_weight import EIGHT_BITS, Rows, StoredWeight
from jaxpaged.params.safetensors_reader import DTYPES, STORED_DTYPES, TensorEntry, mapped
from jaxpaged.params.schemes.floats4 import Mxfp4
from jaxpaged.params.schemes.scheme import EMBEDDING, HEAD, LINEAR, OTHER, Quantization, Scheme, StoredTensor
from jaxpaged.params.spec import Spec

WEIGHT = "weight"
DECODED_AT_ONCE = 2**20
"""Weights: they and what they become stay in a core's nearer caches."""
EMBEDDINGS = re.compile(r"(.*\.)?(embed_tokens|wte|embedding)")
STACK = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)")
"""The name of a tensor with the matrices of all experts."""
UNSTACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What the matrices of an expert are called where it has its own."""


def encoded_specs(specs: Any, quantization: Quantization | None) -> Any:
    """The specs with the scheme of every weight that is stored by one."""
    if quantization is None:
        return specs
    return jax.tree.map(lambda spec: encoded(spec, quantization), specs)


def encoded(spec: Spec, quantization: Quantization) -> Spec:
    """A spec with its scheme. A stack of matrices in one tensor has one for each in files that were quantised, unless
    the scheme is made for stacks."""
    if not holds_weights(spec):
        return spec
    found = STACK.fullmatch(spec.hf_name)
    if found is None:
        scheme = quantization.scheme_of(module_of(spec), kind_of(spec))
        return spec if is_of_stacks(scheme) else replace(spec, scheme=scheme)
    name = UNSTACKED[found["projection"]][spec.part]
    one = f"{found['experts']}.{{}}.{name}"
    scheme = quantization.scheme_of(one.format(0), LINEAR)
    if scheme is None:
        return spec
    if is_of_stacks(scheme):
        return replace(spec, scheme=scheme, transposed=False)
    plain: dict[str, Any] = {"fused": (), "part": 0, "fused_axis": 0, "alternating": False, "transposed": False}
    return replace(spec, scheme=scheme, hf_name=f"{one}.{WEIGHT}", **plain)


def is_of_stacks(scheme: Scheme | None) -> bool:
    """Whether a scheme is one of stacks of matrices in one tensor, and of these only."""
    return isinstance(scheme, Mxfp4) and scheme.is_stack


def holds_weights(spec: Spec) -> bool:
    """Whether it is a matrix, or a stack of them, which a quantiser may have changed."""
    return " " in spec.hf_dims and (spec.hf_name.endswith(f".{WEIGHT}") or STACK.fullmatch(spec.hf_name) is not None)


def module_of(spec: Spec) -> str:
    """The name of the module that has the weight; of experts the first one's."""
    return spec.hf_name.removesuffix(f".{WEIGHT}").format(0)


def kind_of(spec: Spec) -> str:
    """What the module is. Routers, which stay float32, are no linear modules to some quantisers, nor are
    convolutions."""
    if EMBEDDINGS.fullmatch(module_of(spec)):
        return EMBEDDING
    if spec.dims[0] in "VXY":
        return HEAD
    axes = spec.hf_dims.split(" ")[spec.hf_dims.startswith("E ") :]
    return LINEAR if spec.dtype is None and len(axes) == 2 else OTHER


def settled(quantization: Quantization, specs: Any, entries: Mapping[str, TensorEntry]) -> Quantization:
    """The quantization, with what the files say of modules of which config.json says nothing."""
    plain, stored = set[str](), set[str]()
    for spec in filter(holds_weights, jax.tree.leaves(specs)):
        module, kind = module_of(spec), kind_of(spec)
        if STACK.fullmatch(spec.hf_name) or not quantization.asks_files(module, kind):
            continue
        known = entries.get(f"{module}.{WEIGHT}")
        is_plain = known is not None and known.dtype in DTYPES
        if quantization.scheme_of(module, kind) is not None:
            plain |= {module} if is_plain else set()
        elif not is_plain and any(name.startswith(f"{module}.") for name in entries):
            stored.add(module)
    return replace(quantization, plain=frozenset(plain), stored=frozenset(stored))


# ---- its tensors ---------------------------------------------------------------------------------


def matrix_names(spec: Spec, sizes: Mapping[str, int]) -> list[str]:
    """For each matrix of an encoded parameter, that has tensors of its own, what their names begin with."""
    return [name.removesuffix(WEIGHT) for name in spec.tensor_names(sizes)]


def names_of(name: str, tensor: StoredTensor) -> list[str]:
    """Those that a tensor may have of the matrix whose names begin so."""
    return [name + end for end in (tensor.end, *tensor.others)]


def tensors_of_matrix(spec: Spec, shape: tuple[int, ...]) -> tuple[StoredTensor, ...]:
    """What there is in place of a weight of this shape; of a stack in one tensor, what there is of all of it. Raises
    CheckpointError where its sizes are none that the scheme can have."""
    assert spec.scheme is not None
    *stacked, outputs, inputs = shape
    try:
        tensors = spec.scheme.tensors(outputs, inputs)
    except ValueError as error:
        raise CheckpointError(
            f"config.json says that {module_of(spec)} is stored in {spec.scheme.title}, but {error}. Check that "
            "config.json belongs to these weights."
        ) from None
    if not stacked:
        return tensors
    return tuple(replace(each, shapes=tuple((*stacked, *one) for one in each.shapes)) for each in tensors)


@dataclass(frozen=True)
class EncodedMatrix:
    """A weight [O, I] in a file: its tensors by their ends in the scheme, which may be a stack that has it at `index`.

    `rows`: which of its outputs are meant, in order.
    """

    scheme: Scheme
    entries: Mapping[str, TensorEntry]
    inputs: int
    rows: np.ndarray
    index: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, I)."""
        return len(self.rows), self.inputs

    @property
    def file(self) -> TensorEntry:
        """One of its tensors."""
        return next(iter(self.entries.values()))

    def each_part(self, take: Callable[[slice, StoredWeight], None]) -> None:
        """Decode some rows at a time, several at once where there are cores, and hand them over: where they are among
        `rows`, and what they are. CheckpointError for what cannot be."""
        step = max(1, DECODED_AT_ONCE // self.inputs)
        parts = [slice(start, min(start + step, len(self.rows))) for start in range(0, len(self.rows), step)]
        with ExitStack() as maps:
            tensors = {end: maps.enter_context(mapped(each, STORED_DTYPES)) for end, each in self.entries.items()}
            if self.index is not None:
                tensors = {end: tensor[self.index] for end, tensor in tensors.items()}
            one = lambda part: take(part, self._decoded(tensors, part))
            if len(parts) == 1:
                one(parts[0])
                return
            with ThreadPoolExecutor(min(len(parts), num_cores(), MOST_THREADS)) as threads:
                for _ in threads.map(one, parts):
                    pass

    def _decoded(self, tensors: Mapping[str, np.ndarray], part: slice) -> StoredWeight:
        try:
            weight = self.scheme.decoded(tensors, self.inputs, as_range(self.rows[part]))
            check_numbers(weight)
        except ValueError as error:
            raise CheckpointError(
                f"{self.file.path}: {self.file.name} belongs to a weight in {self.scheme.title}, and {error}. "
                "The file is damaged, or its config.json is another model's: download both again."
            ) from None
        return weight

    def dequantized(self, dtype: Any) -> np.ndarray:
        """[R, I] in `dtype`."""
        out_RI = np.empty(self.shape, dtype)

        def take(part: slice, weight: StoredWeight) -> None:
            out_RI[part] = weight.dequantized(dtype)

        self.each_part(take)
        return out_RI


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


MOST_THREADS = 16
"""That decode one matrix."""


class Decoded(Sequence[np.ndarray]):
    """A stack of matrices, each in `shape`, which are decoded when they are asked for."""

    def __init__(self, matrices: Sequence[EncodedMatrix], shape: tuple[int, ...], dtype: Any):
        self._matrices, self._shape, self._dtype = matrices, shape, dtype

    def __len__(self) -> int:
        return len(self._matrices)

    def __getitem__(self, i: Any) -> Any:
        return self._matrices[i].dequantized(self._dtype).reshape(self._shape)


def as_range(rows: np.ndarray) -> Rows:
    """The same rows, as a range where they are one."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 and (np.diff(rows) == 1).all() else rows


def check_numbers(weight: StoredWeight) -> None:
    """ValueError for values that are no numbers, which 8-bit floats may be."""
    if weight.values.dtype not in EIGHT_BITS:
        return
    magnitude = np.ascontiguousarray(weight.values).view(np.uint8) & np.uint8(127)
    first_wrong = 127 if weight.values.dtype == EIGHT_BITS[0] else 124
    if (count := int((magnitude >= first_wrong).sum())) > 0:
        raise ValueError(f"{count} of its values are infinite or no numbers")


def matrices(
    spec: Spec, entries: Mapping[str, TensorEntry], sizes: Mapping[str, int], shape: tuple[int, ...], rows: np.ndarray
) -> list[EncodedMatrix]:
    """Those of an encoded parameter, in order, of each of which `rows` are meant. `shape` is that of a tensor in the
    place of those that there are."""
    assert spec.scheme is not None
    found = []
    tensors = [each for each in tensors_of_matrix(spec, shape) if each.is_read]
    indices = range(shape[0]) if len(shape) > 2 else [None]
    for name in matrix_names(spec, sizes):
        here = {each.end: [entries[one] for one in names_of(name, each) if one in entries] for each in tensors}
        own = {end: there[0] for end, there in here.items() if there}
        found += [EncodedMatrix(spec.scheme, own, shape[-1], rows, index) for index in indices]
    return found
