"""What the scheduler counts since the engine started."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxpaged.core.request import Request


@dataclass
class Counters:
    """Tokens that were looked for and found in the prefix cache, preemptions, requests for which the model computed no
    finite numbers, and drafts. The names are those of `SchedulerStats`."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_corrupted_reqs: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = field(default_factory=list)

    def count_hit(self, request: Request, num_tokens: int) -> None:
        """An admission that found `num_tokens` in the prefix cache.

        A request that comes back after preemption is not counted again.
        """
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_tokens
            request.note_admission()
            if request.reads_prefix_cache:
                self.prefix_cache_queries += request.num_tokens
                self.prefix_cache_hits += num_tokens

    def count_corrupted(self, requests: Iterable[Request]) -> None:
        """A step computed no finite numbers for these; those that ended before are counted already."""
        self.num_corrupted_reqs += sum(not request.is_finished for request in requests)
