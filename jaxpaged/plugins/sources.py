"""Where plugins come from: files and modules that an option names, and entry points of installed packages.

Finding a source runs nothing of it. Its digest is that of the file, or of all Python files of its package.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.plugins.plugin import Plugin, as_plugin
from jaxpaged.plugins.registered import MODULES_OF_FILES

GENERAL = "jaxpaged.general_plugins"
IO_PROCESSORS = "jaxpaged.io_processor_plugins"
NAMED_BY_OPTION = "option"
"""Stands for a group where an option has a plugin's place."""


@dataclass(frozen=True)
class Group:
    """A group of entry points. `seam`: what its entries add, each under its own name; None: each is a `Plugin`.
    `loads_unnamed`: without being named by an option. `shapes_programs`: programs may be made of what they add."""

    seam: str | None
    loads_unnamed: bool = True
    shapes_programs: bool = False


GROUPS = {
    GENERAL: Group(None, shapes_programs=True),
    "jaxpaged.stat_logger_plugins": Group("stat_loggers"),
    "jaxpaged.endpoint_plugins": Group("endpoints", loads_unnamed=False),
    IO_PROCESSORS: Group("io_processors", loads_unnamed=False),
}
"""By vLLM's names. What opens a door to clients loads only where an option names it."""
OUR_GROUP = re.compile(rb"^\[\s*jaxpaged\.", re.MULTILINE)
OWN_NAMES = ("PLUGIN", "MODEL")
"""What a file calls its plugin, the first one that is there."""


@dataclass(frozen=True)
class Source:
    """A plugin that was found. `place`: its file, or 'module:NAME'. `origin`: where that is from, in words."""

    name: str
    place: str
    group: str
    origin: str

    @property
    def full_name(self) -> str:
        return f"{self.group}:{self.name}"

    def is_called(self, name: str) -> bool:
        """Whether an option means it: by its name, or by that and its group's."""
        return name in (self.name, self.full_name)

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")

    @property
    def files(self) -> tuple[Path, ...]:
        """Its file, or all Python files of its package. Raises ConfigError where there is none."""
        if self.is_file:
            return (Path(self.place),)
        top = self.place.partition(":")[0].partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is None:
            raise ConfigError(
                f"the plugin {self.name} ({self.origin}) cannot be loaded: there is no module {top!r}. Install it "
                "where every process of the engine runs, or name a file."
            )
        folders = [Path(each) for each in spec.submodule_search_locations or ()]
        if folders:
            return tuple(sorted(path for folder in folders for path in folder.rglob("*.py")))
        return (Path(spec.origin),) if spec.origin and spec.origin.endswith(".py") else ()

    def digest(self) -> str:
        """Of its files. Raises ConfigError for one that cannot be read."""
        content = hashlib.sha256()
        for path in self.files:
            content.update(hashlib.sha256(read(self, path)).digest())
        return content.hexdigest()[:16]

    def value(self) -> Any:
        """What is there. Raises whatever its code raises, and ConfigError where nothing of that name is."""
        if self.is_file:
            module = module_of_file(self)
            found = [getattr(module, name) for name in OWN_NAMES if hasattr(module, name)]
            if not found:
                raise ConfigError(f"{self.place} has no PLUGIN. Add PLUGIN = jaxpaged.Plugin(...), or a MODEL.")
            return found[0]
        module_name, _, path = self.place.partition(":")
        found = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
        return found

    def plugin(self) -> Plugin:
        """What it adds. Raises as `value` does."""
        seam = GROUPS[self.group].seam if self.group in GROUPS else None
        return as_plugin(self.value()) if seam is None else Plugin(**{seam: {self.name: self.value()}})


def read(source: Source, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the plugin {source.name}, {path}: {error.strerror}.") from None


def module_of_file(source: Source) -> Any:
    """The module that a file makes; the same one again while the file is the same. Raises what its code raises."""
    path = Path(source.place).resolve()
    content = read(source, path)
    name = f"{MODULES_OF_FILES}{path.stem}_{hashlib.sha256(str(path).encode() + content).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# ---- finding -------------------------------------------------------------------------------------


def named_sources(places: Sequence[str]) -> list[Source]:
    """Those that the option `plugin` names. Raises ConfigError for what is neither a file nor 'module:NAME'."""
    sources = []
    for place in places:
        module, _, attribute = place.partition(":")
        is_name = all(part.isidentifier() for part in f"{module}.{attribute}".split("."))
        if not place.endswith(".py") and not is_name:
            raise ConfigError(f"plugin is {place!r}; it must be a Python file, such as my_model.py, or 'module:NAME'.")
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError(f"there is no plugin {place}: no such file in {Path.cwd()}. Check the path.")
        sources.append(Source(place, place, NAMED_BY_OPTION, "the option plugin"))
    return sources


def may_be_installed() -> bool:
    """Whether a package may have entry points of ours: a third of the time of `entry_points`, and every start asks."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except NotADirectoryError:
            return True  # an archive, of which only importlib knows
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                with contextlib.suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                    if OUR_GROUP.search(file.read()):
                        return True
    return False


def installed_sources() -> list[Source]:
    """Entry points of all groups, of every installed package, whether they load or not. Takes some milliseconds."""
    if not may_be_installed():
        return []
    from importlib.metadata import entry_points

    found = []
    for entry in entry_points():
        if entry.group in GROUPS:
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
            found.append(Source(entry.name, entry.value.partition("[")[0].strip(), entry.group, f"package {package}"))
    return list(dict.fromkeys(found))


def chosen_names(plugins: Sequence[str] | None) -> tuple[str, ...]:
    """The installed plugins that load where the option `plugins` says so: those that it names, or those that load
    without it, as 'GROUP:NAME'. Raises ConfigError for a name that no package has."""
    if plugins is not None and not plugins:
        return ()
    installed = installed_sources()
    if plugins is None:
        return tuple(dict.fromkeys(each.full_name for each in installed if GROUPS[each.group].loads_unnamed))
    known = [each.name for each in installed]
    for name in plugins:
        if not any(each.is_called(name) for each in installed):
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"plugins names {name!r}, which no installed package has.{did_you_mean(name, known)} Installed: "
                f"{listed}. A file is named by the option plugin."
            )
    return tuple(dict.fromkeys(plugins))


def sources_of(plugin: Sequence[str], plugins: Sequence[str] | None) -> list[Source]:
    """All that load, by the options of these names. Raises ConfigError, also where two packages have one name."""
    sources, names = named_sources(plugin), chosen_names(plugins)
    for each in installed_sources() if names else ():
        if not any(each.is_called(name) for name in names):
            continue
        for other in sources:
            if other.full_name == each.full_name:
                raise ConfigError(
                    f"two packages have the plugin {each.name} in {each.group}: {other.origin} and {each.origin}. "
                    "Uninstall one."
                )
        sources.append(each)
    return sources
