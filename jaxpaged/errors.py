"""The exception tree. Every message says what happened, the values, and what to do.

    JaxpagedError
    ├── UsageError            the caller asked for something that cannot be; exit code 2
    │   ├── ConfigError       an engine option: unknown, out of range, or in conflict with another
    │   ├── ConflictError     the engine is in no state for it now: asleep, or profiling already
    │   └── RequestError      one request: its prompt or its sampling parameters; others go on
    ├── CheckpointError       files of a model: missing, truncated, misnamed, or not supported
    ├── CapacityError         the device has too little memory for what was asked
    └── EngineError           the engine itself: a failed step, a broken invariant
        ├── EngineRestartError  it was replaced while a request was under way; the same request may succeed now
        └── EngineDeadError   nothing can be served

Nothing here knows about HTTP; a server maps these classes to status codes.
"""

import difflib
from collections.abc import Iterable


class JaxpagedError(Exception):
    """Base of every error that jaxpaged raises on purpose."""


class UsageError(JaxpagedError, ValueError):
    """The caller asked for something that cannot be. It is a `ValueError` too, as callers of vLLM expect."""


class ConfigError(UsageError):
    """An engine option is unknown, out of range, or contradicts another."""


class ConflictError(UsageError):
    """What was asked does not go together with the state that the engine is in now."""


class RequestError(UsageError):
    """One request cannot be served as asked. `parameter` names the field at fault, if one is."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter = parameter


class CheckpointError(JaxpagedError):
    """A model's files are missing, damaged, or describe a model that is not supported."""


class CapacityError(JaxpagedError):
    """Device memory is too small for the weights, or for one request of `max_model_len`."""


class EngineError(JaxpagedError):
    """A step failed, or an invariant of the engine did not hold."""


class EngineRestartError(EngineError):
    """The engine died or hung while a request was under way, and is replaced: sending it again may succeed."""


class EngineDeadError(EngineError):
    """The engine has stopped; no request can be served any more."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest known name, or an empty string when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
