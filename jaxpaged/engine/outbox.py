"""What an engine core has to say and has not said yet: one output a request, however many steps it comes from.

Usually that is what one step gave. More gathers while the core awaits all that is in flight, to reset its cache or to
sleep, and on the front end's side while that does not keep up. This module knows nothing of who hears it.
"""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from jaxpaged.messages import EngineCoreOutput, EngineCoreOutputs

NEWEST = ("num_cached_tokens", "num_preemptions")
"""Fields in which a later output says how things are now. In the others it may have nothing to say."""
GROWING = ("new_token_ids", "new_logprobs")
"""Fields in which it says what came besides."""


class Outbox:
    """Outputs in the order in which their requests first had something to say."""

    def __init__(self) -> None:
        self._outputs: list[EngineCoreOutput] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return any(output.request_id == request_id for output in self._outputs)

    def add(self, outputs: list[EngineCoreOutput]) -> None:
        """What came next, at most one output of each request. The list is the outbox's own from now on."""
        if not self._outputs:
            self._outputs = outputs
            return
        before = {output.request_id: output for output in self._outputs}
        for output in outputs:
            if output.request_id in before:
                join(before[output.request_id], output)
            else:
                self._outputs.append(output)

    def take(self) -> list[EngineCoreOutput]:
        """All there is; nothing is left."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def discard(self, request_ids: Iterable[str]) -> None:
        """Whatever these requests had to say, nobody wants to hear it."""
        if self._outputs:
            unwanted: Collection[str] = frozenset(request_ids)
            self._outputs = [output for output in self._outputs if output.request_id not in unwanted]


def as_one(steps: Sequence[EngineCoreOutputs]) -> EngineCoreOutputs:
    """What several steps said, one after the other, as if it were a run of them. Their outputs are used up."""
    if len(steps) == 1:
        return steps[0]
    outbox = Outbox()
    for step in steps:
        outbox.add(step.outputs)
    num_steps = sum(step.stats.num_steps for step in steps)
    return EngineCoreOutputs(outbox.take(), msgspec.structs.replace(steps[-1].stats, num_steps=num_steps))


def join(first: EngineCoreOutput, second: EngineCoreOutput) -> None:
    """Add to `first` what the next output of the same request says."""
    assert first.finish_reason is None, f"{first.request_id} had ended, and says more"
    for name in EngineCoreOutput.__struct_fields__[1:]:
        value = getattr(second, name)
        if name in GROWING:
            if value and not getattr(first, name):
                setattr(first, name, value)
            elif value:
                getattr(first, name).extend(value)
        elif name in NEWEST or value is not None:
            setattr(first, name, value)
