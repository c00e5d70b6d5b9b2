"""`jaxpaged plugins`: which plugins there are, from where, and what they add. No engine is started.

Those that would load are loaded, since only their code says what they add; one that fails is shown with its error.
"""

import argparse
import dataclasses
import importlib
import json
from typing import Any

from jaxpaged.config.plugin_options import PluginConfig
from jaxpaged.config.sections import CompileConfig
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import engine_options
from jaxpaged.entrypoints.option_flags import add_flag
from jaxpaged.entrypoints.terminal import complain

NAMING = ("plugin", "plugins")
"""Options that name plugins."""
BACKENDS = ("attention_backend", "recurrence_backend")
"""Options that may say where a backend of one's own is."""
EPILOG = """\
Installed plugins are entry points of the groups jaxpaged.general_plugins, jaxpaged.stat_logger_plugins,
jaxpaged.endpoint_plugins and jaxpaged.io_processor_plugins. Those of the first two load by themselves.

exit status: 0 all that load can be used; 1 one of them cannot

examples:
  jaxpaged plugins
  jaxpaged plugins --plugin my_model.py --plugins my_endpoints
  jaxpaged plugins --recurrence-backend my_package.states:BACKEND
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser("plugins", help="plugins on this machine, and what they add", epilog=EPILOG)
    for option in dataclasses.fields(PluginConfig):
        if option.name in NAMING:
            add_flag(parser, option.name, option.type, option.metadata["help"], None, several=True)
    for option in dataclasses.fields(CompileConfig):
        if option.name in BACKENDS:
            add_flag(parser, option.name, option.type, option.metadata["help"], None)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    parser.set_defaults(run=run, command_parser=parser, config=None)


def run(args: argparse.Namespace) -> int:
    """Print the list. Returns the exit status."""
    from jaxpaged.config import EngineConfig

    options = EngineConfig.from_options(**engine_options(args))
    rows, problem = listed(options.plugins.plugin, options.plugins.plugins)
    for option in BACKENDS:
        if ":" in (place := getattr(options.compile, option)):
            rows.append(backend_row(option, place))
            problem = problem or rows[-1].get("error")
    for row in rows:
        print(json.dumps(row) if args.json else in_words(row))
    if not rows and not args.json:
        print("no plugins are installed, and none is named")
    if problem:
        complain(args.command_parser.prog, f"error: {problem}")
    return 1 if problem else 0


def listed(plugin: tuple[str, ...], plugins: tuple[str, ...] | None) -> tuple[list[dict[str, Any]], str | None]:
    """What is shown of each plugin, and why an engine would not start with them, if it would not."""
    from jaxpaged.errors import ConfigError
    from jaxpaged.plugins.loading import Loaded, load, together
    from jaxpaged.plugins.plugin import SEAMS
    from jaxpaged.plugins.sources import installed_sources, sources_of

    used = sources_of(plugin, plugins)
    rows, loaded, problem = [], list[Loaded](), None
    for source in [*used, *(each for each in installed_sources() if each not in used)]:
        row: dict[str, Any] = {"name": source.name, "group": source.group, "place": source.place, "from": source.origin}
        rows.append(row | {"loads": source in used})
        if source not in used:
            continue
        try:
            added = load(source)
            rows[-1]["adds"] = {seam: sorted(names) for seam in SEAMS if (names := added.added(seam))}
            rows[-1]["digest"] = source.digest()
            loaded.append(Loaded(source.name, added, source))
        except ConfigError as error:
            rows[-1]["error"] = str(error)
            problem = problem or str(error)
    try:
        together(loaded)
    except ConfigError as error:
        problem = problem or str(error)
    return rows, problem


def backend_row(option: str, place: str) -> dict[str, Any]:
    """What is shown of a backend that an option names, and can be imported."""
    from jaxpaged.errors import ConfigError
    from jaxpaged.plugins.loading import digests

    module, _, name = place.partition(":")
    row = {"name": place, "group": "backends", "place": place, "from": f"the option {option}", "loads": True}
    try:
        kind = type(getattr(importlib.import_module(module), name)).__name__
        return row | {"adds": {option: [kind]}, "digest": digests([place], ())[place]}
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return row | {"error": f"{option}: {place!r} cannot be imported: {what}"}


def in_words(row: dict[str, Any]) -> str:
    """Some lines about a plugin."""
    lines = [f"{row['name']}  {row['group']}, {row['from']}, {row['place']}"]
    if "error" in row:
        lines.append(f"  error: {row['error']}")
    elif not row["loads"]:
        lines.append("  does not load; name it with --plugins")
    for seam, names in row.get("adds", {}).items():
        lines.append(f"  {seam.replace('_', ' ')}: {', '.join(names)}")
    return "\n".join(lines)
