"""How prompts share a step: the tokens that decoding leaves are divided by age, and by length.

A request must compute its remaining known tokens before it can sample. Requests are served oldest first, so that of
equal ones each is done as early as can be. But a prompt that lacks at most half of what the oldest one lacks goes
before it, in half of the step: a short prompt behind long ones is computed in the next steps, and a long one takes at
most twice the steps. Beyond a half the mean wait would grow: L and S tokens one after the other take L and L + S, with
half a step for each 2 S and L + S, which is no more in sum while S is at most L / 2. This module knows no model and no
step.
"""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.kv_transfer.transfers import KVTransfers
from jaxpaged.core.request import Request
from jaxpaged.core.request_queue import AGES, RequestQueue

LOOKAHEAD = 64
"""At most so many waiting requests are looked up in the prefix cache in a step."""


class Prefill(NamedTuple):
    """A request that lacks `num_tokens` before it samples. A step may compute `most` of them. `is_short`: the request
    goes before those that are not, in their half of the step."""

    request: Request
    num_tokens: int
    most: int
    is_short: bool = False


def divide_budget(prefills: Sequence[Prefill], budget: int) -> list[int]:
    """How many tokens of a step each prefill gets. The oldest is the first.

    A request that is less important than the oldest does not go before it.
    """
    scheduled = [0] * len(prefills)
    if not prefills:
        return scheduled
    oldest, left = prefills[0], budget // 2
    short = [
        index
        for index, each in enumerate(prefills)
        if (each.is_short or 2 * each.num_tokens <= oldest.num_tokens)
        and each.request.priority <= oldest.request.priority
    ]
    for index in sorted(short, key=lambda index: (not prefills[index].is_short, prefills[index].num_tokens)):
        scheduled[index] = min(prefills[index].most, left)
        left -= scheduled[index]
    left += budget - budget // 2
    for index, each in enumerate(prefills):
        more = min(each.most - scheduled[index], left)
        scheduled[index] += more
        left -= more
    return scheduled


class PrefillScheduler:
    """Finds the prompts of a step, and divides its tokens among them."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, transfers: KVTransfers | None = None):
        """`config` is resolved. `transfers`: loads keys and values from besides the device."""
        self._is_cut = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold
        self._age = AGES[config.scheduling_policy]
        self._manager, self._transfers = manager, transfers

    def divide(
        self, prompts: Sequence[Request], queue: RequestQueue, num_rows: int, budget: int, *, is_alone: bool
    ) -> list[tuple[Prefill, int]]:
        """How many of the `budget` tokens of a step each request gets, none included, in the order in which they are to
        be scheduled.

        `prompts`: running requests that do not decode. `queue`: waiting ones, the next one first; `num_rows` of them
        could run beside the running ones. `is_alone`: there is only one request, which no threshold limits.
        """
        limit = 0 if is_alone else self._threshold
        is_short = queue.is_short
        prefills = [prefill_of(each, each.num_computed_tokens, limit, is_short(each)) for each in prompts]
        if queue and num_rows:
            prefills += self._waiting(prefills, queue, num_rows, budget, limit)
        prefills.sort(key=lambda prefill: self._age(prefill.request))
        return list(zip(prefills, divide_budget(prefills, budget)))

    def _waiting(
        self, running: Sequence[Prefill], queue: RequestQueue, num_rows: int, budget: int, limit: int
    ) -> list[Prefill]:
        """Prefills of requests in the queue.

        A request waits, and lets others pass, if an older one is about to compute or load most of its tokens: it will
        find them in the prefix cache. A request whose pages are being loaded waits, too. Pages are sent for only where
        the request would fit beside all before it; otherwise pages of one request would push out those of another.
        No other request is passed by for want of blocks, or where prompts are not cut, of tokens: nothing is scheduled
        behind one that would not fit with all before it, nor behind one with a token in flight, from which it goes on.
        """
        manager, transfers, prefills = self._manager, self._transfers, list[Prefill]()
        reserved, promised = [0] * len(manager.pools), set[bytes]()
        for each in running:
            manager.reserve_rest(each.request, reserved)
            promised.update(manager.hashes_filled(each.request, each.num_tokens))
        openings = queue.openings(num_rows)
        looked_at = islice(openings.requests, LOOKAHEAD)
        for request in looked_at:
            if not openings.has_row_for(request):
                break
            hit = manager.get_computed_blocks(request)
            prefill = prefill_of(request, hit.num_tokens, limit, queue.is_short(request))
            has_room = not request.num_output_placeholders and manager.fits_whole(request, hit, reserved)
            is_behind = 2 * manager.num_tokens_behind(request, hit, promised) > prefill.num_tokens
            if transfers is not None and transfers.is_loading(request, hit, may_begin=has_room and not is_behind):
                manager.reserve_whole(request, hit, reserved)
                promised.update(manager.hashes_filled(request, hit.num_tokens + transfers.num_tokens_loading(request)))
                continue
            if not has_room:
                break
            if is_behind:
                continue
            budget -= prefill.most
            if budget < 0 and not self._is_cut:
                break
            prefills.append(prefill)
            openings.take_row(request)
            if not openings.num_rows:
                break
            manager.reserve_whole(request, hit, reserved)
            promised.update(manager.hashes_filled(request, request.num_tokens))
        if transfers is not None:
            transfers.pass_over(looked_at)
        return prefills


def prefill_of(request: Request, num_computed: int, limit: int, is_short: bool) -> Prefill:
    """`limit`: tokens of one step; 0: none."""
    num_tokens = request.num_tokens_with_placeholders - num_computed
    return Prefill(request, num_tokens, min(num_tokens, limit or num_tokens), is_short)
