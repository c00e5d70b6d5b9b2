"""8-bit floats: DeepSeek's with a scale for every block, and those with one for a matrix or for every output.

A matrix is `weight` F8_E4M3 [O, I] and a scale, which is multiplied: `weight_scale_inv` of blocks, `weight_scale` of
all of it or of every output. How activations are rounded is no part of the model: here they are not, and
`input_scale` is left where it is.

Letters: I inputs and O outputs of a matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpaged.params.formats.float8 import float8
from jaxpaged.params.formats.stored_weight import Rows, StoredWeight
from jaxpaged.params.schemes.fields import Fields
from jaxpaged.params.schemes.scheme import FLOATS, NAMED, Numbers, Quantization, Rule, StoredTensor, of_activations

VALUES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
SCALES = (*FLOATS, "F8_E8M0", "U8")
INPUT_SCALES = of_activations("input_scale", "activation_scale", "input_scale_inv")


@dataclass(frozen=True)
class Float8:
    """`block`: rows and columns that have a scale in common; None: a scale is of the whole, or of an output."""

    block: tuple[int, int] | None = None
    stored: str = "F8_E4M3"

    @property
    def title(self) -> str:
        return "FP8" if self.block is None else f"FP8 in blocks of {self.block[0]} x {self.block[1]}"

    @property
    def numbers(self) -> Numbers:
        return Numbers(VALUES[self.stored], self.block and self.block[1])

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (outputs,), (outputs, 1))
        if self.block is not None:
            shapes = ((-(-outputs // self.block[0]), -(-inputs // self.block[1])),)
        weight = StoredTensor("weight", (self.stored,), ((outputs, inputs),))
        scale = StoredTensor("weight_scale", SCALES, shapes, others=("weight_scale_inv",))
        return weight, scale, *INPUT_SCALES

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        return float8(tensors["weight"], tensors["weight_scale"], block=self.block, rows=rows)


def read(fields: Fields) -> Quantization:
    """Of `quant_method` fp8. Modules that are left are named by their whole name, or by what they are in."""
    fields.choice("fmt", ("e4m3", "float8_e4m3fn", None))
    fields.choice("quant_type", ("fp8", None))
    fields.choice("activation_scheme", ("dynamic", "static", None))
    block = fields.value("weight_block_size")
    scheme = Float8() if block is None else Float8(fields.block("weight_block_size", block))
    names = fields.names("ignored_layers", "modules_to_not_convert", "ignore")
    fields.refuse_unread({"kv_cache_scheme", "dequantize"})
    return Quantization(
        method="FP8",
        source=fields.source,
        rules=tuple(Rule(NAMED, name, None) for name in names),
        default=scheme,
        says_which=bool(names),
        facts=repr(scheme.block) if scheme.block else repr(scheme),
    )
