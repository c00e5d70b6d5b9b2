"""What must not fail half way: an engine core's own records."""

from types import TracebackType
from typing import NoReturn

from jaxpaged.errors import EngineDeadError


class Books:
    """Around what must not fail: after an error in such a block the books are wrong, so the engine stops. Then every
    such block raises EngineDeadError."""

    def __init__(self) -> None:
        self.death: BaseException | None = None
        """Why the engine has stopped."""

    def __enter__(self) -> None:
        if self.death is not None:
            self.refuse()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.death = error
            if isinstance(error, Exception):
                raise EngineDeadError(f"the engine broke down and stops: {error!r}. Start a new one.") from error

    def refuse(self) -> NoReturn:
        """Raise EngineDeadError: the engine has stopped."""
        raise EngineDeadError(f"the engine has stopped: {self.death!r}. Start a new one.") from self.death
