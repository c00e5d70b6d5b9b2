"""Who computes how much of its prompt in a step: the tokens that decoding leaves are granted by age, and by length.

Whoever is to sample next has to compute what it lacks of its known tokens: a claim. Claims are met by age, so that of
equal ones each is done as early as can be. But a claim of at most half of what the oldest one lacks goes before it,
in half of the step: a short prompt behind long ones is read in the next steps, and a long one takes at most twice the
steps. From there on the mean wait would grow: L and S tokens one after the other take L and L + S, with half a step
for each 2 S and L + S, which is no more in sum while S is at most L / 2. This module knows no model and no step.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxpaged.config import SchedulerConfig
from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.request import Request
from jaxpaged.core.request_queue import RequestQueue, priority_order

LOOKAHEAD = 64
"""Waiting requests that are looked at in a step at most, each for what the prefix cache has of it."""


class Claim(NamedTuple):
    """A request that lacks `num_tokens` before it samples, of which a step takes `most`. `is_short`: it goes before
    those that are not, in their half of the step."""

    request: Request
    num_tokens: int
    most: int
    is_short: bool = False


AGES: dict[str, Callable[[Claim], Any]] = {
    "fcfs": lambda claim: claim.request.arrival_order,
    "priority": lambda claim: priority_order(claim.request),
}
"""Sort key of claims by the name of the scheduling policy: the oldest, or the most important, is the first."""


def grant_tokens(claims: Sequence[Claim], budget: int) -> list[int]:
    """How many tokens of a step each of the claims gets, the oldest of which is the first.

    One that is less important than the oldest does not go before it.
    """
    grants = [0] * len(claims)
    if not claims:
        return grants
    oldest, left = claims[0], budget // 2
    short = [
        index
        for index, claim in enumerate(claims)
        if (claim.is_short or 2 * claim.num_tokens <= oldest.num_tokens)
        and claim.request.priority <= oldest.request.priority
    ]
    for index in sorted(short, key=lambda index: (not claims[index].is_short, claims[index].num_tokens)):
        grants[index] = min(claims[index].most, left)
        left -= grants[index]
    left += budget - budget // 2
    for index, claim in enumerate(claims):
        more = min(claim.most - grants[index], left)
        grants[index] += more
        left -= more
    return grants


class PromptGrants:
    """The options that count for it."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager):
        """`config` is resolved."""
        self._is_cut = config.enable_chunked_prefill
        self._threshold = config.long_prefill_token_threshold
        self._age = AGES[config.scheduling_policy]
        self._manager = manager

    def of_step(
        self, lacking: Sequence[Request], queue: RequestQueue, num_rows: int, budget: int, *, alone: bool
    ) -> list[tuple[Claim, int]]:
        """What each gets of the `budget` tokens of a step, nothing included, in the order in which they are to get it.

        `lacking`: running requests that do not decode. `queue`: others, the next one first, of which `num_rows` could
        run beside those that do. `alone`: there is only one request, which no threshold limits.
        """
        limit = 0 if alone else self._threshold
        is_short = queue.is_short
        claims = [claim_of(each, each.num_computed_tokens, limit, is_short(each)) for each in lacking]
        if queue and num_rows:
            claims += self._waiting(claims, queue, num_rows, budget, limit)
        claims.sort(key=self._age)
        return list(zip(claims, grant_tokens(claims, budget)))

    def _waiting(
        self, running: Sequence[Claim], queue: RequestQueue, num_rows: int, budget: int, limit: int
    ) -> list[Claim]:
        """Claims of requests in the queue.

        One most of whose tokens somebody before it is about to compute or load waits, and lets others pass: it will
        find them in the prefix cache. So does one whose pages are being loaded, which are sent for only where it would
        fit beside all before it: what came for one would push out what came for another. Nobody else is passed by for
        want of blocks, or where prompts are not cut, of tokens: behind one that would not fit with all before it nobody
        has a claim, nor behind one with a token in flight, from which it goes on.
        """
        manager, transfers, claims = self._manager, self._manager.transfers, list[Claim]()
        reserved, promised = [0] * len(manager.pools), set[bytes]()
        for claim in running:
            manager.reserve_rest(claim.request, reserved)
            promised.update(manager.hashes_filled(claim.request, claim.num_tokens))
        openings = queue.openings(num_rows)
        looked_at = islice(openings.requests, LOOKAHEAD)
        for request in looked_at:
            if not openings.has_row_for(request):
                break
            hit = manager.get_computed_blocks(request)
            claim = claim_of(request, hit.num_tokens, limit, queue.is_short(request))
            has_room = not request.num_output_placeholders and manager.fits_whole(request, hit, reserved)
            is_behind = 2 * manager.num_tokens_behind(request, hit, promised) > claim.num_tokens
            if transfers is not None and transfers.is_loading(request, hit, may_begin=has_room and not is_behind):
                manager.reserve_whole(request, hit, reserved)
                promised.update(manager.hashes_filled(request, hit.num_tokens + transfers.num_tokens_loading(request)))
                continue
            if not has_room:
                break
            if is_behind:
                continue
            budget -= claim.most
            if budget < 0 and not self._is_cut:
                break
            claims.append(claim)
            openings.take_row(request)
            if not openings.num_rows:
                break
            manager.reserve_whole(request, hit, reserved)
            promised.update(manager.hashes_filled(request, request.num_tokens))
        if transfers is not None:
            transfers.pass_over(looked_at)
        return claims


def claim_of(request: Request, num_computed: int, limit: int, is_short: bool) -> Claim:
    """`limit`: of a step; 0: none."""
    num_tokens = request.num_tokens_with_placeholders - num_computed
    return Claim(request, num_tokens, min(num_tokens, limit or num_tokens), is_short)
