"""Updates of the weights while requests are served: begun, sent in any number of parts, and finished or given up.

The names and phases are vLLM's. All that comes is checked when it comes, and again as a whole when the update is
finished; only then is the first weight replaced, between two steps. Until then, and when anything is wrong, the engine
serves the weights that it has. Afterwards requests under way go on with the new ones: what was computed of them is
computed again, unless they are kept over a pause with their keys and values. No token is drawn from layers of two
versions. What the prefix cache has of the old weights is found by nobody, here or in any tier, since every block's hash
begins with the version of the weights.
"""

from collections.abc import Callable
from typing import Any

from jaxpaged.executor.base import Executor
from jaxpaged.interrupts import accepted_interrupts
from jaxpaged.messages import WeightInfo


class WeightUpdates:
    """`settle` waits for all steps in flight, `note` tells the scheduler of other weights, and `lose` that there are
    none."""

    def __init__(
        self, executor: Executor, settle: Callable[[], None], note: Callable[[], None], lose: Callable[[], None]
    ):
        self._executor, self._settle, self._note, self._lose = executor, settle, note, lose
        self._num_updates, self._num_bytes = 0, 0
        self._is_updating = False

    def start_weight_update(self, is_partial: bool) -> None:
        """Begin an update; what came of one before that was not finished is forgotten. `is_partial`: parameters that do
        not come stay. Raises UsageError for weights that cannot be updated, and ConflictError while they sleep."""
        self._executor.workers.start_weight_update(is_partial)
        self._is_updating, self._num_bytes = True, 0

    def update_weights(self, weights: Any, mapping: str | None) -> int:
        """Files or folders in safetensors format, addresses where a trainer offers weights, or, from this process,
        arrays by the checkpoint's names; with `mapping` a framework's tree, or where one is. Returns how many bytes
        have come. Raises CheckpointError for what is no part of the model, ServerError for a trainer who is not there,
        UsageError for a mapping that the model has not, and ConflictError unless an update was begun; nothing of it is
        kept then, so that it can be sent again."""
        self._num_bytes = self._executor.workers.receive_weights(weights, mapping)
        return self._num_bytes

    def take_weights_back(self) -> None:
        """Forget the part that came last, unless it was refused: another core has refused it."""
        self._num_bytes = self._executor.workers.take_weights_back()

    def abandon_weight_update(self) -> None:
        """Forget what has come; the weights stay as they are. Without an update it passes."""
        self._executor.workers.abandon_weight_update()
        self._is_updating, self._num_bytes = False, 0

    def check_weight_update(self) -> None:
        """Raise CheckpointError or ConflictError where `finish_weight_update` would, which changes nothing then."""
        self._executor.workers.check_weight_update()

    def finish_weight_update(self, version: str) -> WeightInfo:
        """Compute with the weights that came. `version`: what outputs call them; "" for a name made here. Raises
        CheckpointError when some are missing, ConflictError, and CapacityError when memory is too little, with which
        the update is given up; then the old ones stay. What breaks later leaves none: the weights sleep, and waking
        loads the checkpoint's."""
        self.check_weight_update()
        self._settle()
        try:
            with accepted_interrupts():
                self._executor.workers.make_room_for_update()
        except BaseException:
            self.abandon_weight_update()
            raise
        self._is_updating = False  # from here on it is gone, whatever becomes of it
        try:
            with accepted_interrupts():
                self._executor.workers.finish_weight_update(version)
        except BaseException:  # an interrupt, too, comes when some are replaced
            self._lose()
            raise
        return self._done()

    def adopt_weights(self, tree: Any, version: str, donate: bool) -> WeightInfo:
        """Compute with the arrays of a tree in the structure of the engine's parameters, which must be in this process.
        Arrays that lie as the engine's do are not copied; unless `donate`, they stay the caller's too, who must not
        donate them to a program. Raises CheckpointError, ConflictError."""
        self._settle()
        self._executor.collective_rpc("adopt_weights", (tree, version, donate), {})
        return self._done()

    def get_weight_info(self) -> WeightInfo:
        """Which weights compute now."""
        label = self._executor.weights_label
        return WeightInfo(label or "", self._num_updates, self._is_updating, self._num_bytes)

    def _done(self) -> WeightInfo:
        self._num_updates += 1
        self._note()
        return self.get_weight_info()
