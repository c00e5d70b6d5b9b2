"""The exception tree, and how messages show values. Every message says what happened, the values, and what to do.

    JaxpagedError
    ├── UsageError            the caller asked for something that cannot be; exit code 2
    │   ├── ConfigError       an engine option: unknown, out of range, or in conflict with another
    │   ├── ConflictError     the engine is in no state for it now: asleep, or profiling already
    │   └── RequestError      one request: its prompt or its sampling parameters; others go on
    ├── CheckpointError       files of a model: missing, truncated, misnamed, or not supported
    ├── CapacityError         the device has too little memory for what was asked
    ├── PageError             a page of cached keys and values is damaged, or is not the one that was asked for
    ├── ServerError           a server that a command asks cannot be reached, or does not answer as it should
    └── EngineError           the engine itself: a failed step, a broken invariant
        ├── EngineRestartError  it was replaced while a request was under way; the same request may succeed now
        └── EngineDeadError   nothing can be served
            └── ProgramError  a program that all requests need cannot be compiled, however often it is tried

Python and JSON can write half of a surrogate pair ("\\ud800"), which no encoding takes. Such a text is refused where it
comes in (`check_unicode`), since hashing, sending or printing it fails later, far from the caller.

Nothing here knows about HTTP; a server maps these classes to status codes.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import msgspec

LONGEST_SHOWN = 200
SECRET_NAME = re.compile(r"(token|pass(word|wd|phrase)|secret|credentials?|key)$", re.IGNORECASE)
"""How options end whose text nobody may see in a log."""
USER_INFO = re.compile(r"(?<=//)[^/@\s]*@")
"""Name and password in an address."""
HIDDEN = "***"


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


class FetchError(RequestError):
    """What a URL names may be fetched, but could not be. Servers of HTTP answer 422."""


class CheckpointError(JaxpagedError):
    """A model's files are missing, damaged, or describe a model that is not supported."""


class CapacityError(JaxpagedError):
    """Device memory is too small for the weights, or for one request of `max_model_len`."""


class PageError(JaxpagedError):
    """A stored page of keys and values is damaged, or is another's than was asked for: it must not be used."""


class ServerError(JaxpagedError):
    """A server cannot be reached, or does not answer as its API says."""


class EngineError(JaxpagedError):
    """A step failed, or an invariant of the engine did not hold."""


class EngineRestartError(EngineError):
    """The engine died or hung while a request was under way, and is replaced: sending it again may succeed."""


class EngineDeadError(EngineError):
    """The engine has stopped; no request can be served any more."""


class ProgramError(EngineDeadError):
    """A program that ordinary requests need cannot be compiled with this model and these options."""


def error_named(name: str, message: str) -> JaxpagedError:
    """The error that another process reports by the name of its class and its message."""
    kind = globals().get(name)
    if isinstance(kind, type) and issubclass(kind, JaxpagedError):
        return kind(message)
    return EngineError(f"{name}: {message}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for a known name that this is a slip or a part of, or an empty string when none is.

    A slip is a letter in four, at least one, that is wrong, missing, too much, or swapped with its neighbour. A part
    has at least half of the words, in their order: `max_seqs` for `max_num_seqs`. Capitals, - and _ make no difference.
    """
    words = words_of(name)
    written = "_".join(words)
    best: tuple[int, int, str] | None = None
    for candidate in known:
        theirs = words_of(candidate)
        meant = "_".join(theirs)
        edits = num_edits(written, meant) if abs(len(meant) - len(written)) <= len(written) // 4 + 1 else len(written)
        is_slip = edits <= max(len(written) // 4, 1) and edits < len(written)
        is_part = 2 * len(words) >= len(theirs) > len(words) >= 1 and in_order(words, theirs)
        if is_slip or is_part:
            found = (0 if is_slip else 1, edits if is_slip else len(meant), candidate)
            best = min(best or found, found)
    return f" Did you mean {best[2]!r}?" if best else ""


class SuggestsNames(msgspec.StructMeta):
    """The class of structs that people make by keywords: for one that a struct has not, the TypeError names the nearest
    one that it has."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except TypeError:
            name = next((name for name in given if name not in cls.__struct_fields__), None)
            if name is None:
                raise
            near = did_you_mean(name, cls.__struct_fields__)
        raise TypeError(f"{cls.__name__} has no parameter {name!r}.{near}")


def words_of(name: str) -> list[str]:
    """`max`, `num`, `seqs` of `--max-num-seqs`, `max_num_seqs` and `maxNumSeqs`."""
    return re.findall(r"[^-_\s]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def in_order(words: list[str], among: list[str]) -> bool:
    """Whether all `words` are in `among`, in this order."""
    rest = iter(among)
    return all(word in rest for word in words)


def num_edits(a: str, b: str) -> int:
    """Letters to replace, insert, drop, or swap with their neighbours, to make `b` of `a`, each letter once."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
    return row[-1]


def check_unicode(field: str, text: str) -> None:
    """Raise RequestError that names `field` when `text` holds half of a surrogate pair."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} is not valid Unicode: it holds half of a surrogate pair, {shown(text[error.start])}. Replace it.",
            field,
        ) from None


def shown(value: Any) -> str:
    """A value as an error shows it: cut where it is long, and its type alone where it cannot be shown."""
    try:
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
        text.encode()
    except Exception:  # nested too deep, a number of too many digits, or a class of the caller's that fails
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def shown_option(name: str, value: Any) -> str:
    """A value of the option `name` as an error shows it, with `HIDDEN` in place of what may be a secret."""
    try:
        return shown(without_secrets(name, value))
    except RecursionError:
        return f"a {type(value).__name__}"


def without_secrets(name: str, value: Any) -> Any:
    """The value with `HIDDEN` for what is called like a secret, and for users and passwords in URLs."""
    if SECRET_NAME.search(name) and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_secrets(name, each) for each in value)
    return USER_INFO.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its package is missing; or it was put aside by a test
        return False


def how_to_install(extra: str) -> str:
    """What to run for an extra. jaxpaged is installed from its source: no registry has it."""
    return f"run pip install -e '.[{extra}]' in the folder of jaxpaged's source"
