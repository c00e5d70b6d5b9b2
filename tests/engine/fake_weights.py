"""Weights of executors that compute nothing: what is sent to them, and what they are called."""

from jaxpaged.errors import CheckpointError, ConflictError


class FakeWeights:
    weights_version: str = ""
    weights_label: str | None = None
    arrived: list[str] | None = None  # the parts of an update
    missing = False

    def start_weight_update(self, is_partial: bool) -> None:
        self.arrived = []

    def receive_weights(self, weights: str) -> int:
        if self.arrived is None:
            raise ConflictError("no update of weights was begun.")
        if weights.endswith("bad"):
            raise CheckpointError(f"{weights} is truncated")
        self.arrived.append(weights)
        return len(self.arrived)

    def abandon_weight_update(self) -> None:
        self.arrived = None

    def check_weight_update(self) -> None:
        if self.arrived is None:
            raise ConflictError("no update of weights was begun.")
        if self.missing:
            raise CheckpointError("1 of 2 weights did not come.")

    def finish_weight_update(self, label: str) -> None:
        self.weights_version = self.weights_label = label
        self.arrived = None
