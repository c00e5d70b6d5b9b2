"""Schemes of 4-bit floats: MXFP4, as gpt-oss and compressed-tensors write it, and NVFP4, as it and ModelOpt do.

Letters: I inputs and O outputs of a matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxpaged.params.formats.float4 import E2M1, MX_GROUP, NV_GROUP, mxfp4, nvfp4
from jaxpaged.params.formats.stored_weight import Rows, StoredWeight
from jaxpaged.params.schemes.fields import Fields
from jaxpaged.params.schemes.fp8 import INPUT_SCALES
from jaxpaged.params.schemes.scheme import NAMED, Numbers, Quantization, Rule, StoredTensor, of_activations
from jaxpaged.params.schemes.whole_numbers import groups_of


@dataclass(frozen=True)
class Mxfp4:
    """`is_stack`: one tensor has the matrices of all experts, and its name has other ends (gpt-oss)."""

    is_stack: bool = False

    @property
    def title(self) -> str:
        return "MXFP4"

    @property
    def numbers(self) -> Numbers:
        return Numbers(E2M1, MX_GROUP)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups, (packed, scales) = groups_of(inputs, MX_GROUP), self._ends
        shape = (outputs, groups, MX_GROUP // 2) if self.is_stack else (outputs, inputs // 2)
        return (
            StoredTensor(packed, ("U8",), (shape,), others=() if self.is_stack else ("weight",)),
            StoredTensor(scales, ("U8", "F8_E8M0"), ((outputs, groups),)),
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        packed, scales = self._ends
        return mxfp4(tensors[packed], tensors[scales], name=scales, rows=rows)

    @property
    def _ends(self) -> tuple[str, str]:
        """Of packed numbers, and of scales."""
        return ("_blocks", "_scales") if self.is_stack else ("weight_packed", "weight_scale")


@dataclass(frozen=True)
class Nvfp4:
    """`is_divisor`: scales are divided by the one that all of a matrix has (compressed-tensors), and not multiplied
    (ModelOpt)."""

    is_divisor: bool

    @property
    def title(self) -> str:
        return "NVFP4"

    @property
    def numbers(self) -> Numbers:
        return Numbers(E2M1, NV_GROUP)

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups, (packed, whole) = groups_of(inputs, NV_GROUP), self._ends
        return (
            StoredTensor(packed, ("U8",), ((outputs, inputs // 2),)),
            StoredTensor("weight_scale", ("F8_E4M3",), ((outputs, groups),)),
            StoredTensor(whole, ("F32",), ((), (1,))),
            *of_activations("input_global_scale"),
            *INPUT_SCALES,
        )

    def decoded(self, tensors: Mapping[str, np.ndarray], inputs: int, rows: Rows) -> StoredWeight:
        packed, whole = self._ends
        return nvfp4(tensors[packed], tensors["weight_scale"], tensors[whole], is_divisor=self.is_divisor, rows=rows)

    @property
    def _ends(self) -> tuple[str, str]:
        """Of packed numbers, and of the scale that all of a matrix has."""
        return ("weight_packed", "weight_global_scale") if self.is_divisor else ("weight", "weight_scale_2")


def read(fields: Fields) -> Quantization:
    """Of `quant_method` mxfp4, gpt-oss's: experts are packed, and all else is left."""
    names = fields.names("modules_to_not_convert")
    fields.refuse_unread({"dequantize"})
    return Quantization(
        method="MXFP4",
        source=fields.source,
        rules=tuple(Rule(NAMED, name, None) for name in names),
        default=Mxfp4(is_stack=True),
        says_which=bool(names),
        facts="None",  # pages of such a model are named by what config.json says of its experts
    )
