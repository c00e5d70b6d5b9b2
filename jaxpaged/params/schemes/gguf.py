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
from jaxpaged.params.schemes.scheme import EXACT, Numbers, Quantization, Rule, Scheme, StoredTensor

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
        width = width_in_file(self.kind, inputs)
        if self.turned_heads and outputs % (2 * self.turned_heads):
            raise ValueError(f"its {outputs} outputs are not {self.turned_heads} heads of pairs")
        return (StoredTensor("weight", (self.kind,), ((outputs, width),)),)

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        tensor = tensors["weight"]
        own = tensor[rows] if not self.turned_heads else tensor[rows_in_file(len(tensor), self.turned_heads)[rows]]
        if self.kind not in PLAIN:
            weight = decoded(own, KINDS[self.kind])
            assert isinstance(weight, StoredWeight)
            return weight
        return StoredWeight(own, np.ones((len(own), 1), np.float32), None, inputs)


@dataclass(frozen=True)
class GgufOfLatents:
    """What makes keys and values of latents, head by head, in two tensors: `keys` [heads, I, key_dim] and `values`
    [heads, value_dim, I] are the names of their types. As one matrix they are rows of the first head's keys and values,
    then the next one's, which are decoded, since keys lie in blocks along the other axis."""

    keys: str
    values: str
    heads: int
    key_dim: int
    value_dim: int

    @property
    def title(self) -> str:
        return f"GGUF's {self.keys} and {self.values}"

    @property
    def numbers(self) -> Numbers:
        return Numbers("float32")

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        if outputs != self.heads * (self.key_dim + self.value_dim):
            raise ValueError(
                f"its {outputs} outputs are not {self.heads} heads of keys of {self.key_dim} and values of "
                f"{self.value_dim}"
            )
        keys = (self.heads, inputs, width_in_file(self.keys, self.key_dim))
        values = (self.heads, self.value_dim, width_in_file(self.values, inputs))
        return StoredTensor("k_b", (self.keys,), (keys,)), StoredTensor("v_b", (self.values,), (values,))

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        size = self.key_dim + self.value_dim
        heads_R, places_R = np.divmod(np.arange(self.heads * size)[rows], size)
        out_RI = np.empty((len(heads_R), inputs), np.float32)
        for head in np.unique(heads_R):
            mine = heads_R == head
            keys_kI = in_float32(tensors["k_b"][head], self.keys).T
            values_vI = in_float32(tensors["v_b"][head], self.values)
            out_RI[mine] = np.concatenate([keys_kI, values_vI])[places_R[mine]]
        return StoredWeight(out_RI, np.ones((len(out_RI), 1), np.float32), None, inputs)


def width_in_file(kind: str, inputs: int) -> int:
    """Of a row of so many inputs: numbers, or bytes of blocks. ValueError where they are no whole blocks."""
    if inputs % KINDS[kind].block:
        raise ValueError(f"its {inputs} inputs do not divide into blocks of {KINDS[kind].block}")
    return inputs if kind in PLAIN else inputs // KINDS[kind].block * KINDS[kind].num_bytes


def in_float32(rows: np.ndarray, kind: str) -> np.ndarray:
    """What rows in a file mean."""
    if kind in PLAIN:
        return rows.astype(np.float32)
    weight = decoded(rows, KINDS[kind])
    assert isinstance(weight, StoredWeight)
    return weight.dequantized(np.float32)


def rows_in_file(outputs: int, turned_heads: int) -> np.ndarray:
    """For each output, in the model's order, where the file has it."""
    return np.arange(outputs).reshape(turned_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def read(fields: Fields) -> Quantization:
    """Of the description in a folder that was made for a GGUF file: module -> type, and heads where they are turned; or
    the fields of `GgufOfLatents`."""
    modules = fields.value("modules")
    fields.refuse_unread()
    schemes: dict[str, Scheme] = {
        module: GgufOfLatents(**facts) if isinstance(facts, dict) else Gguf(*facts) for module, facts in modules.items()
    }
    facts = sorted({scheme.title.removeprefix("GGUF's ") for scheme in schemes.values()})
    rules = tuple(Rule(EXACT, module, scheme) for module, scheme in schemes.items())
    return Quantization("GGUF", fields.source, rules, None, says_which=True, facts=f"GGUF {' '.join(facts)}")
