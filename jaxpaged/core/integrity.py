"""Assertions over the scheduler's books, for tests: every block, request and placeholder is accounted for."""

from collections.abc import Collection, Iterable

from jaxpaged.core.kv_cache.manager import KVCacheManager
from jaxpaged.core.request import Request, RequestStatus


def check_books(
    requests: Collection[Request], running: Collection[Request], waiting: Iterable[Request], manager: KVCacheManager
) -> None:
    """Assert that `requests`, all that are unfinished, either run or wait, and hold what they may."""
    run, wait = set(running), set(waiting)
    assert len(run) == len(running)
    assert not run & wait
    assert run | wait == set(requests)
    assert all(r.status is RequestStatus.RUNNING for r in run)
    assert all(not any(r.blocks) and r.num_computed_tokens == r.decode_limit == 0 for r in wait)
    assert all(r.num_tokens_with_placeholders <= r.max_total_tokens for r in run | wait)
    assert all(r.num_computed_tokens <= manager.num_slots(r) for r in run)
    manager.check_integrity(run)
