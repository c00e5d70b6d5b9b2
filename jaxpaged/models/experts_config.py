"""What config.json says of experts, in numbers, and what the engine's options add to it."""

from dataclasses import dataclass

from jaxpaged.layers.experts import RouterConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """Feed-forward blocks of `num_experts` experts, each of `width` columns, in the layers that `layers` names.

    `shared_width`: columns of the experts that all tokens share, 0 where there are none. `encoding`: how the checkpoint
    packs the weights of experts, if it does (`Spec.encoding`). `num_redundant`: so many more places than experts there
    are at least, which the engine's options say (`expert_balance.py`).
    """

    num_experts: int
    width: int
    router: RouterConfig
    layers: tuple[int, ...]
    shared_width: int = 0
    encoding: str | None = None
    num_redundant: int = 0

    @property
    def num_places(self) -> int:
        return self.num_experts + self.num_redundant

    def dim_sizes(self) -> dict[str, int]:
        """Letter -> size of that axis in the checkpoint; of places, how many there should be."""
        return {"E": self.num_experts, "e": self.num_places, "Q": self.width, "O": self.shared_width}
