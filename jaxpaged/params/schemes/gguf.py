"""Schemes of GGUF's types of weights. Which tensor has which is seen in the file, and comes here as a description that
`params/gguf_folder` made of it.

Letters: I inputs and O outputs of a matrix, R some of the outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpaged.params.formats.gguf.blocks import PLAIN, decoded
from jaxpaged.params.formats.gguf.types import TYPES
from jaxpaged.params.formats.stored_weight import Rows, StoredWeight
from jaxpaged.params.schemes.fields import Fields
from jaxpaged.params.schemes.floats4 import Mxfp4
from jaxpaged.params.schemes.scheme import EXACT, Numbers, Quantization, Rule, StoredTensor

KINDS = {kind.name: kind for kind in TYPES.values()}
NUMBERS = {
    "Q4_0": Numbers("int4", 32),
    **{name: Numbers("int4", 32, has_zeros=True) for name in ("Q4_1", "Q4_K")},
    **{name: Numbers("int8", 32) for name in ("Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS")},
    **{name: Numbers("int8", 32, has_zeros=True) for name in ("Q5_1", "Q5_K")},
    "Q2_K": Numbers("int4", 16, has_zeros=True),
    "Q3_K": Numbers("int4", 16),
    "Q6_K": Numbers("int8", 16),
    "MXFP4": Mxfp4().numbers,
    **{name: Numbers(dtype.name) for name, dtype in PLAIN.items()},
}
"""Type -> what a device would have to hold."""


@dataclass(frozen=True)
class Gguf:
    """`kind` is a type's name. `turned_heads`: so many heads, whose rows the file has in the order of interleaved
    rotation, where the model rotates halves; 0: the rows are in the model's order."""

    kind: str
    turned_heads: int = 0

    @property
    def title(self) -> str:
        return f"GGUF's {self.kind}"

    @property
    def numbers(self) -> Numbers:
        return NUMBERS[self.kind]

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        kind = KINDS[self.kind]
        if inputs % kind.block:
            raise ValueError(f"its {inputs} inputs do not divide into blocks of {kind.block}")
        if self.turned_heads and outputs % (2 * self.turned_heads):
            raise ValueError(f"its {outputs} outputs are not {self.turned_heads} heads of pairs")
        width = inputs if self.kind in PLAIN else inputs // kind.block * kind.num_bytes
        return (StoredTensor("weight", (self.kind,), ((outputs, width),)),)

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        tensor = tensors["weight"]
        own = tensor[rows] if not self.turned_heads else tensor[rows_in_file(len(tensor), self.turned_heads)[rows]]
        if self.kind not in PLAIN:
            weight = decoded(own, KINDS[self.kind])
            assert isinstance(weight, StoredWeight)
            return weight
        return StoredWeight(own, np.ones((len(own), 1), np.float32), None, inputs)


def rows_in_file(outputs: int, turned_heads: int) -> np.ndarray:
    """For each output, in the model's order, where the file has it."""
    return np.arange(outputs).reshape(turned_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def read(fields: Fields) -> Quantization:
    """Of the description in a folder that was made for a GGUF file: module -> type, and heads where they are turned."""
    modules = fields.value("modules")
    fields.refuse_unread()
    schemes = {module: Gguf(*facts) for module, facts in modules.items()}
    facts = sorted({scheme.kind for scheme in schemes.values()})
    rules = tuple(Rule(EXACT, module, scheme) for module, scheme in schemes.items())
    return Quantization("GGUF", fields.source, rules, None, says_which=True, facts=f"GGUF {' '.join(facts)}")
