"""The times and sizes of recorded steps. This module knows records, and nothing that is drawn of them.

`schedule`, `dispatch` and `update` are the engine core's own work. `compile` is when it waited for a program that was
still being compiled. `wait` is when the host had nothing else to do than wait for the device. `front_end` is what
happens between two calls of the core: text, streaming, the caller. `device` is from the later of dispatch and the
result before it, to the result: with asynchronous scheduling an upper bound, since the host may look late. `gap` is
when no step was in flight though requests were unfinished: the device certainly had nothing to do, for another reason
than `compile`. `encode` is the part of `device` until the embeddings of pictures were there, as far as the host knows.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.messages import StepRecord

MILLISECONDS = 1e3


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step's parts, as the module's docstring defines them. `front_end` is what follows the step."""

    schedule: float
    compile: float
    dispatch: float
    wait: float
    update: float
    front_end: float
    device: float
    gap: float
    encode: float = 0.0

    @property
    def host(self) -> float:
        """The engine core's own work."""
        return self.schedule + self.dispatch + self.update


def step_times(records: Sequence[StepRecord]) -> list[StepTimes]:
    """The parts of every step. Records are in the order of their results."""
    times = []
    for i, record in enumerate(records):
        before = records[i - 1] if i else None
        ready_before = before.result_ready if before else record.schedule_end
        idle = before is not None and not before.num_unfinished
        begin = device_begin(record, ready_before)
        times.append(
            StepTimes(
                schedule=record.schedule_end - record.schedule_begin,
                compile=record.program_wait,
                dispatch=max(record.dispatch_end - record.schedule_end - record.program_wait, 0.0),
                wait=record.result_ready - record.wait_begin,
                update=record.update_end - record.result_ready,
                front_end=front_end_after(records, i),
                device=record.result_ready - begin,
                gap=0.0 if idle else max(record.schedule_end - ready_before, 0.0),
                encode=max(record.encoded_at - begin, 0.0) if record.num_encoded else 0.0,
            )
        )
    return times


def device_begin(record: StepRecord, ready_before: float) -> float:
    """When the device could begin with a step: the result before it is there, and so are its programs."""
    return max(record.schedule_end + record.program_wait, ready_before)


def front_end_after(records: Sequence[StepRecord], i: int) -> float:
    """From the end of a step's update until the core works again; 0 when nothing was left to do.

    What the core does next is to schedule a further step, or, when one is in flight already, to wait.
    """
    if i + 1 == len(records) or not records[i].num_unfinished:
        return 0.0
    end = records[i].update_end
    starts = [later.schedule_begin for later in records[i + 1 : i + 3] if later.schedule_begin >= end]
    return max(min([*starts, records[i + 1].wait_begin]) - end, 0.0)


def step_sizes(record: StepRecord) -> list[int]:
    """Tokens of every step of a record. Those of a run are as equal as they can be: only their sum is on record."""
    if not record.num_steps:
        return []
    size, num_larger = divmod(record.num_tokens, record.num_steps)
    return [size + 1] * num_larger + [size] * (record.num_steps - num_larger)


def padding(record: StepRecord) -> int:
    """Tokens of padding, in all steps of a record."""
    return record.token_bucket * record.num_steps - record.num_tokens


def mean_per_step(record: StepRecord, total: int) -> float:
    """What a total is per step; 0 for a run all of whose requests had ended before."""
    return total / max(record.num_steps, 1)


class ProgramWaits:
    """When the steps of `records` waited for programs that were still being compiled, in seconds since the epoch.

    Steps are recorded by a clock of their own (`time.perf_counter`), requests by the time of day; this knows both.
    """

    def __init__(self, records: Sequence[StepRecord]):
        offset = time.time() - time.perf_counter()
        self.spans = [
            (record.schedule_end + offset, record.schedule_end + offset + record.program_wait)
            for record in records
            if record.program_wait
        ]

    def between(self, begin: float, end: float) -> float:
        """Seconds of waiting between two times."""
        return sum(max(min(end, until) - max(begin, since), 0.0) for since, until in self.spans)
