"""What a plugin is: a record of what it adds, by seam."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxpaged.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from jaxpaged.config import EngineConfig
    from jaxpaged.messages import EngineCoreRequest
    from jaxpaged.models.interface import Model
    from jaxpaged.parsing.parser import ToolFormat
    from jaxpaged.parsing.reasoning import ReasoningFormat
    from jaxpaged.plugins.protocols import EndpointPlugin, IOProcessor, StatLogger
    from jaxpaged.serving.adapter_resolvers import LoRAResolver


def seam(what: str, default: Any = dict) -> Any:
    """A field of `Plugin`. `what`: what one of its entries is, in words."""
    return field(default_factory=default, metadata={"what": what})


@dataclass(frozen=True)
class Plugin:
    """What a plugin adds, by name. `models` have names of their own, their architectures.

    `replaces`: names of what is built in that this plugin means to replace; a name that is taken is an error otherwise.
    Raises ConfigError for what is no mapping of names.
    """

    models: Iterable["Model"] = seam("model", tuple)
    queue_policies: Mapping[str, "Callable[[EngineCoreRequest], int]"] = seam("queue policy")
    tool_parsers: Mapping[str, "ToolFormat"] = seam("tool parser")
    reasoning_parsers: Mapping[str, "ReasoningFormat"] = seam("reasoning parser")
    lora_resolvers: Mapping[str, "LoRAResolver"] = seam("LoRA resolver")
    stat_loggers: Mapping[str, type["StatLogger"]] = seam("stat logger")
    endpoints: Mapping[str, "EndpointPlugin"] = seam("endpoint")
    io_processors: Mapping[str, "Callable[[EngineConfig], IOProcessor]"] = seam("I/O processor")
    replaces: Iterable[str] = ()

    def __post_init__(self) -> None:
        for name, value in ((name, getattr(self, name)) for name in (*SEAMS, "replaces")):
            if isinstance(value, str) or not isinstance(value, Mapping if is_mapping(name) else Iterable):
                wanted = "a mapping of names" if is_mapping(name) else "a list"
                raise ConfigError(f"Plugin has {name} {value!r}; it must be {wanted}.")
        object.__setattr__(self, "models", tuple(self.models))
        object.__setattr__(self, "replaces", frozenset(self.replaces))
        for name in SEAMS:
            for each in self.added(name):
                if not isinstance(each, str) or not each:
                    raise ConfigError(f"Plugin has {name} with the name {each!r}; names are texts.")

    def added(self, name: str) -> Mapping[str, Any]:
        """What it adds to a seam, by name. Raises ConfigError for a model that is no `Model`."""
        if name != "models":
            return getattr(self, name)
        wrong = [each for each in self.models if not isinstance(getattr(each, "architectures", None), tuple)]
        if wrong:
            raise ConfigError(f"Plugin has the model {wrong[0]!r}; it must be a jaxpaged.models.interface.Model.")
        return {architecture: model for model in self.models for architecture in model.architectures}


SEAMS: Mapping[str, str] = {
    each.name: each.metadata["what"] for each in dataclasses.fields(Plugin) if "what" in each.metadata
}
"""Field of `Plugin` -> what one of its entries is."""


def is_mapping(name: str) -> bool:
    return name not in ("models", "replaces")


def as_plugin(value: Any) -> Plugin:
    """The plugin that a file or an entry point has: a `Plugin`, a function that returns one, or a model alone. Raises
    ConfigError for anything else."""
    if isinstance(value, Plugin):
        return value
    if isinstance(getattr(value, "architectures", None), tuple):
        return Plugin(models=[value])
    if callable(value):
        made = value()
        if isinstance(made, Plugin):
            return made
        raise ConfigError(f"{value!r} returned {made!r}; it must return a jaxpaged.Plugin that says what it adds.")
    raise ConfigError(f"{value!r} is no plugin; it must be a jaxpaged.Plugin, or a function that returns one.")


def check_seam(name: str) -> None:
    """Raise ConfigError unless there is such a seam."""
    if name not in SEAMS:
        raise ConfigError(f"there is no seam {name!r}.{did_you_mean(name, SEAMS)}")
