"""Text and values from outside: whether a text can be encoded, and how any value is shown in an error.

Python and JSON can write half of a surrogate pair ("\\ud800"), which no encoding takes: whoever hashes, sends or prints
such a text later fails, far from the one who wrote it. So it is refused where it comes in. This module knows no field.
"""

import re
from collections.abc import Mapping
from typing import Any

from jaxpaged.errors import RequestError

LONGEST_SHOWN = 200
SECRET_NAME = re.compile(r"(token|pass(word|wd|phrase)|secret|credentials?|key)$", re.IGNORECASE)
"""How options end whose text nobody may see in a log."""
USER_INFO = re.compile(r"(?<=//)[^/@\s]*@")
"""Name and password in an address."""
HIDDEN = "***"


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
