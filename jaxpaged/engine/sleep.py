"""What of an engine sleeps: which levels there are, what each puts to sleep, and what a wake-up leaves asleep.

This module keeps the record; freeing memory is the executor's, and what becomes of requests is the core's.
"""

import logging
from collections.abc import Collection

from jaxpaged.errors import UsageError

logger = logging.getLogger(__name__)

LEVELS = (0, 1, 2)
MODES = ("abort", "wait", "keep")
"""What becomes of requests under way: they end, they are finished first, or they go on after waking."""
TAGS = ("scheduling", "weights", "kv_cache")
"""What can be woken by itself."""
PARTS = (("scheduling",), ("weights", "kv_cache"), ("weights", "kv_cache"))
"""What a level puts to sleep. Steps need all of it."""


class SleepRecord:
    """How deep an engine sleeps, and what of it. `level` is None while it is awake."""

    def __init__(self) -> None:
        self.level: int | None = None
        self.parts: frozenset[str] = frozenset()

    def deepen(self, level: int) -> None:
        """The parts of `level` sleep from now on; what already sleeps deeper stays as it is."""
        if level == 0 and self.parts:
            return
        self.level = max(self.level or 0, level) if "weights" in self.parts else level
        self.parts = frozenset(PARTS[level])
        logger.info("the engine sleeps at level %d", self.level)

    def lose_weights(self) -> None:
        """There are no weights any more: they sleep until they are loaded again."""
        self.level = 2
        self.parts |= {"weights"}

    def wake(self, part: str) -> None:
        """This part is awake; with the last of them the engine is."""
        self.parts -= {part}
        logger.info("awake again: %s%s", part, f"; still asleep: {', '.join(self.parts)}" if self.parts else "")
        if not self.parts:
            self.level = None


def check_sleep(level: int, mode: str) -> None:
    """Raise UsageError for a level or a mode that does not exist."""
    if type(level) is not int or level not in LEVELS:
        raise UsageError(f"level is {level!r}; it must be one of {', '.join(map(str, LEVELS))}.")
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}.")


def check_tags(tags: Collection[str] | None) -> None:
    """Raise UsageError for a tag that does not exist. None stands for all."""
    unknown = [tag for tag in tags or () if tag not in TAGS]
    if isinstance(tags, str) or unknown:
        raise UsageError(f"tags is {tags!r}; it must be a list of {', '.join(TAGS)}.")
