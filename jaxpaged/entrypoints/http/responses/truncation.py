"""`truncation: "auto"`: the oldest messages of a conversation that is too long are left out.

Instructions stay, and what is left begins with a user's message, since templates refuse other beginnings. This module
does not know how messages become prompts.
"""

from collections.abc import Callable
from typing import Any

from jaxpaged.engine.input.long_text import PromptTooLongError
from jaxpaged.entrypoints.http.prepare import Prepared

Messages = list[dict[str, Any]]


def newest_that_fit(messages: Messages, make: Callable[[Messages], Prepared], room: int) -> Prepared:
    """What `make` makes of as many messages as have at most `room` prompt tokens.

    The last user's message is kept even when it alone is longer. Raises what `make` raises.
    """
    num_system = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    beginnings = [i for i, each in enumerate(messages) if i > num_system and each["role"] == "user"]
    beginnings = [num_system, *beginnings]
    low, high = 0, len(beginnings) - 1  # the first that fits is between them, or is the last one
    best: Prepared | None = None
    while low < high:
        middle = (low + high) // 2 if best is not None or low else 0  # most conversations fit as they are
        made = within(room, make, messages[:num_system] + messages[beginnings[middle] :])
        if made is None:
            low = middle + 1
        else:
            best, high = made, middle
    return best or make(messages[:num_system] + messages[beginnings[low] :])


def within(room: int, make: Callable[[Messages], Prepared], messages: Messages) -> Prepared | None:
    """None for messages that are too long."""
    try:
        made = make(messages)
    except PromptTooLongError:
        return None
    return made if len(made.prompt.token_ids) <= room else None
