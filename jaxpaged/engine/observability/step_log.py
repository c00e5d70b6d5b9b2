"""The step log: what the last steps held, what they were padded to, and when which part of them happened.

It is always on, since a record costs a few microseconds and its memory is bounded. What records mean is in
`messages.StepRecord`; how they are drawn or fitted is not known here.
"""

import time

import msgspec
import numpy as np

from jaxpaged.messages import ModelRunnerOutput, SchedulerOutput, StepBuckets, StepRecord

CAPACITY = 32_768
"""Steps that are kept: 5 MB, and minutes of steps of some milliseconds each."""
COLUMN_TYPES = tuple(field.type for field in msgspec.structs.fields(StepRecord))
"""bool, int and float, all of which float64 holds exactly: no number of tokens or steps comes near 2**53."""

Times = tuple[float, float, float, float, float]
"""Schedule begin and end, dispatch end, wait begin, result ready: seconds of `time.perf_counter`."""


class StepLog:
    """The newest `capacity` steps that succeeded, in the order in which their results came.

    Numbers of records lie in an array, all of whose memory is there from the start: as objects they would take three
    times as much, and an engine would seem to grow until the log is full. Only the newest is an object, to which
    `add` and its caller may write until the next one comes.
    """

    def __init__(self, capacity: int = CAPACITY):
        self._numbers = np.full((capacity, len(COLUMN_TYPES)), np.nan)
        self._newest: StepRecord | None = None
        self._num_added = 0

    def add(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, num_unfinished: int, times: Times
    ) -> StepRecord:
        """Note a step whose result has just been processed, now being its `update_end`, and return the record."""
        num_tokens, num_sampled, num_steps = scheduled.total_num_scheduled_tokens, len(output.request_ids), 1
        if scheduled.num_steps > 1:  # and perhaps less than that, if its requests ended
            lengths = [len(tokens) for tokens in output.sampled_token_ids]
            num_tokens = num_sampled = sum(lengths)
            num_steps = max(lengths, default=0)
        buckets = output.buckets or StepBuckets(num_tokens, num_sampled)
        record = StepRecord(
            scheduled.step_id,
            num_tokens,
            buckets.token_bucket,
            len(scheduled.request_ids),
            num_sampled,
            buckets.sample_bucket,
            buckets.full_sampler,
            num_unfinished,
            *times,
            time.perf_counter(),
            num_steps,
            buckets.program_wait,
            num_encoded=buckets.num_encoded,
            encoded_at=buckets.encoded_at,
        )
        self._put_away()
        self._num_added += 1
        self._newest = record
        return record

    def _put_away(self) -> None:
        """Write the newest record to its place: nobody changes it any more."""
        if self._newest is not None:
            place = (self._num_added - 1) % len(self._numbers)
            self._numbers[place] = msgspec.structs.astuple(self._newest)

    def read(self, since: int = 0, most: int = CAPACITY) -> tuple[list[StepRecord], int]:
        """The newest records, oldest first, and how many came before them: those that are forgotten, and with `since`
        as many as that. At most `most`: it takes time for these only, however many are kept."""
        self._put_away()
        kept = max(self._num_added - len(self._numbers), 0)
        first = max(kept, self._num_added - most, since if since <= self._num_added else 0)
        lines = self._numbers[np.arange(first, self._num_added) % len(self._numbers)]
        columns = (column.astype(kind).tolist() for column, kind in zip(lines.T, COLUMN_TYPES))
        return [StepRecord(*values) for values in zip(*columns)], first
