"""Schemes of whole numbers of 4 and 8 bits, packed or not, whoever writes them.

Letters: I inputs and O outputs of a matrix, C groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpaged.params.formats.awq import awq
from jaxpaged.params.formats.compressed_tensors import integers, packed_integers
from jaxpaged.params.formats.gptq import gptq
from jaxpaged.params.formats.stored_weight import Rows, StoredWeight
from jaxpaged.params.schemes.scheme import FLOATS, Numbers, StoredTensor, of_activations

WORD = 32
"""Bits of what packed numbers lie in."""


def in_words(title: str, bits: int, group: int | None) -> str:
    """`GPTQ of 4 bits in groups of 128`."""
    return f"{title} of {bits} bits" + (f" in groups of {group}" if group else "")


def groups_of(inputs: int, group: int | None) -> int:
    """How many groups an output has. ValueError where they are not of one size."""
    if group is not None and inputs % group:
        raise ValueError(f"its {inputs} inputs do not divide into groups of {group}")
    return inputs // group if group else 1


def words_of(numbers: int, bits: int, what: str) -> int:
    """How many words hold so many numbers. ValueError where they do not fill them."""
    if numbers * bits % WORD:
        raise ValueError(f"its {numbers} {what} of {bits} bits do not fill words of {WORD} bits")
    return numbers * bits // WORD


@dataclass(frozen=True)
class Gptq:
    """`is_v2`: zeros are stored as they are, and not less one."""

    bits: int
    group: int | None
    is_symmetric: bool
    is_v2: bool
    may_be_ordered: bool

    @property
    def title(self) -> str:
        return in_words("GPTQ", self.bits, self.group)

    @property
    def numbers(self) -> Numbers:
        return Numbers(f"int{self.bits}", self.group, not self.is_symmetric, self.may_be_ordered)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups, words = groups_of(inputs, self.group), words_of(inputs, self.bits, "inputs")
        zeros = (groups, words_of(outputs, self.bits, "outputs"))
        return (
            StoredTensor("qweight", ("I32",), ((words, outputs),)),
            StoredTensor("scales", FLOATS, ((groups, outputs),)),
            StoredTensor("qzeros", ("I32",), (zeros,), is_optional=self.is_symmetric),
            StoredTensor("g_idx", ("I32", "I64"), ((inputs,),), is_optional=True),
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        return gptq(
            tensors["qweight"],
            tensors["scales"],
            tensors.get("qzeros"),
            tensors.get("g_idx"),
            bits=self.bits,
            is_symmetric=self.is_symmetric,
            is_v2=self.is_v2,
            rows=rows,
        )


@dataclass(frozen=True)
class Awq:
    """`has_zeros`: they are not all 8."""

    group: int | None
    has_zeros: bool

    @property
    def title(self) -> str:
        return in_words("AWQ", 4, self.group)

    @property
    def numbers(self) -> Numbers:
        return Numbers("int4", self.group, self.has_zeros)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups, words = groups_of(inputs, self.group), words_of(outputs, 4, "outputs")
        return (
            StoredTensor("qweight", ("I32",), ((inputs, words),)),
            StoredTensor("scales", FLOATS, ((groups, outputs),)),
            StoredTensor("qzeros", ("I32",), ((groups, words),)),
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        return awq(tensors["qweight"], tensors["scales"], tensors["qzeros"], rows=rows)


@dataclass(frozen=True)
class PackedIntegers:
    """compressed-tensors' W4A16 and W8A16. `group` None: a scale of every output."""

    bits: int
    group: int | None
    has_zeros: bool
    may_be_ordered: bool

    @property
    def title(self) -> str:
        return in_words(f"W{self.bits}A16", self.bits, self.group)

    @property
    def numbers(self) -> Numbers:
        return Numbers(f"int{self.bits}", self.group, self.has_zeros, self.may_be_ordered)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups, per_word = groups_of(inputs, self.group), WORD // self.bits
        zeros = StoredTensor("weight_zero_point", ("I32",), ((-(-outputs // per_word), groups),))
        scales: tuple[tuple[int, ...], ...] = ((outputs, groups),)
        return (
            StoredTensor("weight_packed", ("I32",), ((outputs, -(-inputs // per_word)),)),
            StoredTensor("weight_scale", FLOATS, scales if groups > 1 else (*scales, (outputs,), (1,), ())),
            StoredTensor("weight_shape", ("I64", "I32"), ((2,),), is_optional=True),
            *([zeros] if self.has_zeros else []),
            StoredTensor("weight_g_idx", ("I32", "I64"), ((inputs,),), is_optional=True),
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        shape, packed = tensors.get("weight_shape"), tensors["weight_packed"]
        if shape is not None and tuple(shape) != (len(packed), inputs):
            raise ValueError(f"weight_shape is {tuple(map(int, shape))}, but the matrix is {(len(packed), inputs)}")
        return packed_integers(
            packed,
            tensors["weight_scale"],
            tensors.get("weight_zero_point"),
            tensors.get("weight_g_idx"),
            bits=self.bits,
            inputs=inputs,
            rows=rows,
        )


@dataclass(frozen=True)
class Integers:
    """A byte each: W8A8. How activations are rounded is no part of the model."""

    group: int | None = None

    @property
    def title(self) -> str:
        return in_words("W8A8", 8, self.group)

    @property
    def numbers(self) -> Numbers:
        return Numbers("int8", self.group)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups = groups_of(inputs, self.group)
        whole: tuple[tuple[int, ...], ...] = ((outputs, groups), (outputs,), (1,), ()) if groups == 1 else ()
        return (
            StoredTensor("weight", ("I8",), ((outputs, inputs),)),
            StoredTensor("weight_scale", FLOATS, whole or ((outputs, groups),)),
            *of_activations("input_scale", "input_zero_point", "azp_adj", dtypes=(*FLOATS, "I8", "I32")),
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        return integers(tensors["weight"], tensors["weight_scale"], rows=rows)
