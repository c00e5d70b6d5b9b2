"""Models that a script registers before it makes an engine.

The list is the process's, as the script's words are: the only state of this package. Processes that an engine starts
do not run the script, so they are told a model's place, 'module:NAME', where it has one.
"""

import sys
from typing import TYPE_CHECKING

from jaxpaged.errors import ConfigError
from jaxpaged.plugins.plugin import Plugin

if TYPE_CHECKING:
    from jaxpaged.models.interface import Model

MODULES_OF_FILES = "jaxpaged_plugin_"
"""How the modules of files begin that an option names; nobody can import them by name."""

_REGISTERED: list[Plugin] = []


def register_model(model: "Model") -> None:
    """Make `model` known to every engine that this process makes from now on. Registering it again changes nothing.

    Raises ConfigError for what is no model, and for an architecture that another registered model has.
    """
    plugin = Plugin(models=[model])
    for other in _REGISTERED:
        if other.models == plugin.models:
            return
        if both := other.added("models").keys() & plugin.added("models").keys():
            raise ConfigError(f"register_model was called with two models for {min(both)}. Register one.")
    _REGISTERED.append(plugin)


def registered() -> tuple[Plugin, ...]:
    """In the order of registering."""
    return tuple(_REGISTERED)


def places() -> tuple[str, ...]:
    """Where other processes find what this one has registered, as the option `plugin` says it. Raises ConfigError for
    a model that only this process has."""
    return tuple(place_of(model) for plugin in _REGISTERED for model in plugin.models)


def place_of(model: "Model") -> str:
    """'module:NAME' of a model."""
    for name, module in tuple(sys.modules.items()):
        if name == "__main__" or name.startswith(MODULES_OF_FILES):
            continue
        for attribute, value in tuple(getattr(module, "__dict__", {}).items()):
            if value is model and attribute.isidentifier():
                return f"{name}:{attribute}"
    raise ConfigError(
        f"register_model was called with a model for {', '.join(model.architectures)} that no module has but the "
        "program itself, and an engine in other processes cannot import that. Put it into a file of its own, and give "
        "its path as plugin."
    )
