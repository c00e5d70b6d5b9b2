"""Time that requests waited for programs that were still being compiled, which says nothing of how fast an engine is.

Steps are recorded by a clock of their own (`time.perf_counter`), requests by the time of day; this module knows both.
"""

import time
from collections.abc import Sequence

from jaxpaged.messages import StepRecord


class ProgramWaits:
    """When the steps of `records` waited, in seconds since the epoch."""

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
