"""Which adapters a server begins with, as its option `lora_modules` writes them: vLLM's forms.

sql=/adapters/sql
{"name": "sql", "path": "/adapters/sql", "base_model_name": "meta-llama/Llama-3.1-8B"}
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpaged.engine.adapters import why_no_name
from jaxpaged.errors import ConfigError


class LoraModule(NamedTuple):
    """An adapter to load at the start. `base_model_name` is what clients are told of the model that it adapts."""

    name: str
    path: str
    base_model_name: str | None = None


KEYS = ("name", "path", "base_model_name")


def lora_modules(given: Sequence[Any]) -> list[LoraModule]:
    """Raises ConfigError for what has neither form, and for a name that comes twice."""
    modules = [lora_module(each) for each in given]
    names = [each.name for each in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"lora_modules has the name {name!r} {names.count(name)} times. Give each its own.")
    return modules


def lora_module(given: Any) -> LoraModule:
    """One of them. Raises ConfigError."""
    if isinstance(given, str) and "=" in given:
        name, _, path = given.partition("=")
        fields: Mapping[str, Any] = {"name": name, "path": path}
    elif isinstance(given, Mapping):
        fields = {name: value for name, value in given.items() if value is not None}
    else:
        raise ConfigError(f"lora_modules has {given!r}; give NAME=PATH, or JSON with name and path.")
    if unknown := [str(key) for key in fields if key not in KEYS]:
        raise ConfigError(f"lora_modules has an adapter with {unknown[0]!r}; there are {', '.join(KEYS)}.")
    for key in KEYS[:2]:
        if not fields.get(key):
            raise ConfigError(f"lora_modules has an adapter without {key}: {given!r}. Give NAME=PATH.")
    if not all(isinstance(value, str) for value in fields.values()):
        raise ConfigError(f"lora_modules has {given!r}; its values must be texts.")
    if (why := why_no_name(fields["name"])) is not None:
        raise ConfigError(f"lora_modules has the name {fields['name'][:300]!r}; {why}.")
    return LoraModule(**fields)
