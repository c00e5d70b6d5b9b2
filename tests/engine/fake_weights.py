"""Weights of executors that compute nothing: what is sent to them, and what they are called."""

from collections.abc import Sequence

from jaxpaged.errors import CapacityError, CheckpointError, ConflictError, ServerError, UsageError


class FakeWeights:
    weights_version: str = ""
    weights_label: str | None = None
    arrived: list[Sequence[str]] | None = None  # the parts of an update
    missing = False

    def start_weight_update(self, is_partial: bool) -> None:
        self.arrived = []

    def receive_weights(self, weights: Sequence[str], mapping: str | None) -> int:
        if self.arrived is None:
            raise ConflictError("no update of weights was begun.")
        if bad := [each for each in weights if each.endswith("bad")]:
            raise CheckpointError(f"{bad[0]} is truncated")
        if mapping not in (None, "maxtext"):
            raise UsageError(f"mapping is {mapping!r}.")
        if "transfer://127.0.0.1:9" in weights:
            raise ServerError("no weights came from the trainer at 127.0.0.1:9: Connection refused.")
        self.arrived.append(weights)
        return len(self.arrived)

    def take_weights_back(self) -> int:
        assert self.arrived is not None
        del self.arrived[-1:]
        return len(self.arrived)

    def abandon_weight_update(self) -> None:
        self.arrived = None

    def check_weight_update(self) -> None:
        if self.arrived is None:
            raise ConflictError("no update of weights was begun.")
        if self.missing:
            raise CheckpointError("1 of 2 weights did not come.")

    def make_room_for_update(self) -> None:
        pass

    def finish_weight_update(self, label: str) -> None:
        self.arrived = None
        if label == "too large":
            raise CapacityError("2 GiB are free.")
        self.weights_version = self.weights_label = label
