"""What another engine lends for a request is kept while the request is still being checked here, and given back where
it is refused.

A grammar is compiled once before its request is queued, in turns with those of others, which may take longer than a
lease lasts; from then on the core keeps the lease, and gives it back. This module knows no sockets.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from jaxpaged.engine.core_calls import KeepLease
from jaxpaged.engine.input.grammar_checker import GrammarChecker
from jaxpaged.errors import JaxpagedError, RequestError
from jaxpaged.kv_store.transfer_params import PARAMS, source_of, transfer_params


@contextlib.contextmanager
def lease_kept(
    call: Callable[[KeepLease], None], checker: GrammarChecker, params: Any, *, borrows: bool = True
) -> Iterator[None]:
    """While a request with these parameters is checked. The lease is given back if that raises anything, by an engine
    that `borrows`."""
    extra_args = getattr(params, "extra_args", None)
    if not isinstance(extra_args, dict) or not extra_args:
        yield
        return
    if lent := lent_to_one_behind_check(checker, params):
        call(KeepLease(lent))
    try:
        yield
    except BaseException:
        if lent := lent or (lent_to(extra_args.get(PARAMS)) if borrows else {}):
            call(KeepLease(lent, is_needed=False))
        raise


@contextlib.asynccontextmanager
async def lease_kept_meanwhile(
    call: Callable[[KeepLease], Awaitable[None]], checker: GrammarChecker, params: Any, *, gives_back: bool = True
) -> AsyncIterator[None]:
    """The same in an event loop, with a core that answers later. A core that does not answer is for the request itself
    to find out. Not `gives_back`: the caller gives the lease back where that raises anything."""
    lent = lent_to_one_behind_check(checker, params)
    if not lent:
        yield
        return

    async def tell(is_needed: bool) -> None:
        with contextlib.suppress(JaxpagedError):
            await call(KeepLease(lent, is_needed))

    keeping = asyncio.ensure_future(tell(True))
    try:
        yield
        await keeping
    except BaseException:
        await keeping
        if gives_back:
            await tell(False)
        raise


async def let_go(call: Callable[[KeepLease], Awaitable[None]], params: Any) -> None:
    """A request with these `kv_transfer_params` will not be computed: what is lent for it is given back. A core that
    does not answer gives nothing back."""
    if lent := lent_to(params):
        with contextlib.suppress(JaxpagedError):
            await call(KeepLease(lent, is_needed=False))


def lent_to(params: Any) -> Mapping[str, Any]:
    """`kv_transfer_params` that say where a prompt is lent; empty if these do not, or cannot be."""
    with contextlib.suppress(RequestError):
        if isinstance(params, Mapping) and source_of(transfer_params({PARAMS: params})) is not None:
            return params
    return {}


def lent_to_one_behind_check(checker: GrammarChecker, params: Any) -> Mapping[str, Any]:
    """What a request says of where its prompt is lent, if its grammar is to be checked first; else nothing. What is
    wrong with it is for others to refuse."""
    shape = getattr(params, "structured_outputs", None)
    if shape is None or not params.extra_args or checker.is_known(shape):
        return {}
    return lent_to(params.extra_args.get(PARAMS))
