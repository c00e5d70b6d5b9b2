"""Loads plugins, and puts together what they add. One that fails stops the start."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean
from jaxpaged.plugins.plugin import SEAMS, Plugin, check_seam
from jaxpaged.plugins.registered import registered
from jaxpaged.plugins.sources import GROUPS, NAMED_BY_OPTION, Source, sources_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A plugin and where it came from; no source where a script registered it."""

    name: str
    plugin: Plugin
    source: Source | None = None


@dataclass(frozen=True)
class Plugins:
    """All that were loaded. No two of them add one name to a seam."""

    loaded: tuple[Loaded, ...] = ()

    def added(self, seam: str) -> dict[str, Any]:
        """What plugins add to a seam, by name."""
        check_seam(seam)
        return {name: value for each in self.loaded for name, value in each.plugin.added(seam).items()}

    def joined[T](self, seam: str, built_in: Mapping[str, T]) -> Mapping[str, T]:
        """What is built in, and what plugins add. Raises ConfigError for a name of both, unless its plugin replaces
        it."""
        if not self.loaded:
            return built_in
        for each in self.loaded:
            taken = (each.plugin.added(seam).keys() & built_in.keys()) - frozenset(each.plugin.replaces)
            if taken:
                name, what = min(taken), SEAMS[seam]
                raise ConfigError(
                    f"the plugin {each.name} adds the {what} {name}, which is built in. Give it another name, or say "
                    f'that it is meant: replaces=["{name}"].'
                )
        return {**built_in, **self.added(seam)}


def load_plugins(plugin: Sequence[str], plugins: Sequence[str] | None) -> Plugins:
    """Those that the options of these names say, and what a script has registered. Raises ConfigError, with the
    traceback in the log, for one that fails, and for a name that two of them add."""
    known = [Loaded("register_model", each) for each in registered()]
    return together(known + [Loaded(each.name, load(each), each) for each in sources_of(plugin, plugins)])


def load(source: Source) -> Plugin:
    """Run a plugin's code. Raises ConfigError for whatever that raises."""
    logger.info("loading the plugin %s from %s", source.name, source.origin)
    try:
        return source.plugin()
    except (Exception, SystemExit) as error:
        logger.error("the plugin %s (%s) cannot be loaded", source.name, source.origin, exc_info=error)
        raise ConfigError(
            f"the plugin {source.name} ({source.origin}) cannot be loaded: {type(error).__name__}: {error}. Correct "
            "it, or start without it; the log has its traceback."
        ) from error


@contextlib.contextmanager
def ending_start(what: str, failure: str) -> Iterator[None]:
    """Raise ConfigError, with the traceback in the log, where a plugin's own code raises."""
    try:
        yield
    except Exception as error:
        logger.error("%s %s", what, failure, exc_info=error)
        raise ConfigError(
            f"{what} {failure}: {type(error).__name__}: {error}. Start without it; the log has its traceback."
        ) from error


def chosen[T](option: str, name: str, added: Mapping[str, T], others: Iterable[str] = ()) -> T:
    """What the option of this name names of what plugins add. `others`: names that an error tells of too. Raises
    ConfigError."""
    if name not in added:
        names = sorted({*added, *others})
        raise ConfigError(
            f"{option} is {name!r}, which no plugin has.{did_you_mean(name, names)} There are: "
            f"{', '.join(names) or 'none'}. Name the file of its plugin as plugin."
        )
    return added[name]


def together(loaded: Sequence[Loaded]) -> Plugins:
    """Raises ConfigError for a name under which two of them add different things to one seam."""
    owners: dict[tuple[str, str], tuple[str, Any]] = {}
    for each in loaded:
        for seam, what in SEAMS.items():
            for name, value in each.plugin.added(seam).items():
                owner, first = owners.setdefault((seam, name), (each.name, value))
                if first is not value:
                    raise ConfigError(
                        f"the plugins {owner} and {each.name} both add the {what} {name}. Leave one of them out."
                    )
    return Plugins(tuple(loaded))


def shaping_sources(plugin: Sequence[str], plugins: Sequence[str] | None) -> list[Source]:
    """Those of which programs may be made."""
    shapes = (NAMED_BY_OPTION, *(name for name, group in GROUPS.items() if group.shapes_programs))
    return [each for each in sources_of(plugin, plugins) if each.group in shapes]


def digests(plugin: Sequence[str], plugins: Sequence[str] | None) -> dict[str, str]:
    """Name -> digest of every plugin of which programs may be made: what hosts compare, and bundles remember. Nothing
    is run. Raises ConfigError."""
    return {each.name: each.digest() for each in shaping_sources(plugin, plugins)}


def plugin_files(plugin: Sequence[str], plugins: Sequence[str] | None) -> list[Path]:
    """The files that these digests are of. Raises ConfigError."""
    return [path for each in shaping_sources(plugin, plugins) for path in each.files]
