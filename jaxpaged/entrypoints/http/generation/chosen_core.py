"""The engine core that a request names for itself, where there are several: vLLM's header X-data-parallel-rank.

It is kept where every task that works for the request finds it, and read where the engine is asked. This module does
not know how many cores there are: the engine refuses those that it has not.
"""

from collections.abc import Iterable
from contextvars import ContextVar

from jaxpaged.serving.errors import ServingError

HEADER = "X-data-parallel-rank"
CHOSEN: ContextVar[int | None] = ContextVar("chosen_core", default=None)


def choose_core(headers: Iterable[tuple[str, str]]) -> None:
    """What follows in this task, and in tasks that it begins, is for the core that these headers name, if they do.

    The names are in lower case. Raises ServingError for a value that is no number of a core, and for two.
    """
    given = [value for name, value in headers if name == HEADER.lower()]
    if len(given) > 1:
        raise ServingError(f"{HEADER} is given {len(given)} times. Send one.", HEADER)
    if given and not (given[0].isascii() and given[0].isdecimal() and len(given[0]) <= 4):
        raise ServingError(f"{HEADER} is {given[0]!r}; it must be the number of an engine core.", HEADER)
    CHOSEN.set(int(given[0]) if given else None)
