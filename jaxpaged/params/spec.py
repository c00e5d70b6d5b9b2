"""What a parameter is, said once, by letters: its axes here, its axes in the checkpoint, its name there.

    q_proj = Spec("NHD", "NH D", "model.layers.0.self_attn.q_proj.weight")

Shape, sharding and loading follow from it. Axes stand in the checkpoint's order, so that loading transposes nothing
that is not marked: a projection is [out..., in] and is contracted over its last axis. This module knows letters, and
neither sizes nor devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.params.dims import ALPHABET
from jaxpaged.params.schemes.scheme import Scheme


@dataclass(frozen=True)
class Spec:
    """One parameter.

    `dims` has one letter per axis of the array that the model uses. `hf_dims` are the axes in the checkpoint,
    apart by spaces; letters that stand together were merged into one axis. When the checkpoint's first axis is
    several parameters end to end, `fused` lists their first axes and `part` says which of them this one is:

        k_proj = Spec("KHD", "KH D", "....qkv_proj.weight", fused=("NH", "KH", "KH"), part=1)

    They may also lie on another axis, `fused_axis`, and take turns there (`alternating`) instead of lying end to end.
    `transposed`: the tensor has the last two of `hf_dims` in the other order. `scheme`: the checkpoint was quantised,
    and has other tensors in place of each one that `hf_name` names (`encoded.py`).

        up_proj = Spec("eQD", "E Q D", "....gate_up_proj", fused=("Q", "Q"), part=1, fused_axis=1, alternating=True)

    Where they stand end to end within every head, `within` has the letters of what is not divided:

        k_up = Spec("Nkc", "Nk c", "....kv_b_proj.weight", fused=("k", "v"), part=0, within="N")

    Experts of the checkpoint, E, have places on devices, e, of which there may be more.

    When the first axis is spread over as many tensors, `hf_name` has `{}` in place of their numbers; an axis of size 1
    that the model does without is spelled 1:

        gate_proj = Spec("eQD", "E Q D", "....experts.{}.gate_proj.weight")
        shared_expert_gate = Spec("D", "1 D", "....shared_expert_gate.weight", dtype="float32")

    `quantized`: the model uses a `QuantizedArray` ("int8", or an 8-bit float), a `PackedArray` ("int4") or a
    `StoredArray` (quantized.py) instead of an array; None: it does not. `dtype` is that of numbers which
    are no weights, such as "int32", and of weights that are never rounded; None: that of the others. `whole`: every
    device has all of it, whatever its letters say.
    """

    dims: str
    hf_dims: str
    hf_name: str
    fused: tuple[str, ...] = ()
    part: int = 0
    within: str = ""
    quantized: Any = None
    dtype: str | None = None
    fused_axis: int = 0
    alternating: bool = False
    transposed: bool = False
    scheme: Scheme | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        assert set(self.dims) <= ALPHABET.keys(), f"{self.dims!r} uses letters outside the alphabet"
        spelled = self.dims.replace("e", "E")
        assert self.stored_dims == spelled, f"{self.hf_dims!r} does not spell {self.dims!r}"
        assert not self.is_stacked or self.hf_dims.split(" ")[0] == self.stored_dims[0], f"{self} is no stack"
        own_axis = self.hf_dims.split(" ")[self.fused_axis]
        assert not self.fused or self.within + self.fused[self.part] == own_axis, f"{self} is not its own part"
        assert not (self.is_stacked and self.transposed), f"{self} has several tensors already"

    @property
    def stored_dims(self) -> str:
        """One letter per axis, as the checkpoint has them: its experts, where devices have places of experts."""
        return self.hf_dims.replace(" ", "").replace("1", "")

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint has a tensor for each number on the first axis."""
        return "{}" in self.hf_name

    def tensor_names(self, sizes: Mapping[str, int]) -> list[str]:
        """The names of its tensors in the checkpoint, or of those in place of which there are others."""
        return (
            [self.hf_name.format(i) for i in range(sizes[self.stored_dims[0]])] if self.is_stacked else [self.hf_name]
        )


def linear(dims: str, hf_dims: str, hf_name: str) -> Spec:
    """The weight of a linear layer."""
    return Spec(dims, hf_dims, f"{hf_name}.weight")


def bias(out_dims: str, hf_name: str) -> Spec:
    """The bias of a linear layer; its output axes are one in the checkpoint."""
    return Spec(out_dims, out_dims, f"{hf_name}.bias")
