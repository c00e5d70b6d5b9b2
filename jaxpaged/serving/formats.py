"""The formats of calls and of thinking that a server may be told to look for: those of the package, and of plugins."""

from jaxpaged.parsing.parser import BUILT_IN, REASONING_PARSERS, TOOL_FORMATS, Formats
from jaxpaged.parsing.watched import Watch
from jaxpaged.plugins.loading import Plugins


def formats_of(plugins: Plugins) -> Formats:
    """Those that are built in, and those of plugins. Raises ConfigError for a name of both."""
    if not plugins.loaded:
        return BUILT_IN
    tools = plugins.joined("tool_parsers", TOOL_FORMATS)
    reasoning = plugins.joined("reasoning_parsers", REASONING_PARSERS)
    added = plugins.added("tool_parsers").keys() | plugins.added("reasoning_parsers").keys()
    return Formats(tools, reasoning, {name: Watch(name) for name in sorted(added)})
