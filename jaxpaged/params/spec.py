"""What a parameter is, said once, by letters: its axes here, its axes in the checkpoint, its name there.

    q_proj = Spec("NHD", "NH D", "model.layers.0.self_attn.q_proj.weight")

Shape, sharding and loading follow from it. Axes stand in the checkpoint's order, so that loading never
transposes: a projection is [out..., in] and is contracted over its last axis. This module knows letters, and
neither sizes nor devices.
"""

from dataclasses import dataclass

from jaxpaged.params.dims import ALPHABET


@dataclass(frozen=True)
class Spec:
    """One parameter.

    `dims` has one letter per axis of the array that the model uses. `hf_dims` are the axes in the checkpoint,
    apart by spaces; letters that stand together were merged into one axis. When the checkpoint's first axis is
    several parameters end to end, `fused` lists their first axes and `part` says which of them this one is:

        k_proj = Spec("KHD", "KH D", "....qkv_proj.weight", fused=("NH", "KH", "KH"), part=1)

    `quantized`: the model uses a `QuantizedArray` (quantized.py) instead of an array. `dtype` is that of numbers which
    are no weights, such as "int32"; None: that of the weights.
    """

    dims: str
    hf_dims: str
    hf_name: str
    fused: tuple[str, ...] = ()
    part: int = 0
    quantized: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        assert set(self.dims) <= ALPHABET.keys(), f"{self.dims!r} uses letters outside the alphabet"
        assert self.hf_dims.replace(" ", "") == self.dims, f"{self.hf_dims!r} does not spell {self.dims!r}"
        assert not self.fused or self.fused[self.part] == self.hf_dims.split(" ")[0], f"{self} is not its own part"


def linear(dims: str, hf_dims: str, hf_name: str) -> Spec:
    """The weight of a linear layer."""
    return Spec(dims, hf_dims, f"{hf_name}.weight")


def bias(out_dims: str, hf_name: str) -> Spec:
    """The bias of a linear layer; its output axes are one in the checkpoint."""
    return Spec(out_dims, out_dims, f"{hf_name}.bias")
