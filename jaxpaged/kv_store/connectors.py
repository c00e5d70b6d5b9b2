"""Which connectors of one's own are installed, by the entry points of packages. What they are is in
`custom_store.py`."""

from collections.abc import Sequence
from typing import Any

from jaxpaged.errors import ConfigError, did_you_mean

GROUP = "jaxpaged.kv_connectors"


def installed_connectors() -> dict[str, Any]:
    """The entry points by name."""
    from importlib.metadata import entry_points  # it takes a while to import, and most engines have none

    return {entry.name: entry for entry in entry_points(group=GROUP)}


def check_connector(name: str, module: str | None, known: Sequence[str]) -> None:
    """Raise ConfigError for a name that no installed package has; `known` are those that need none."""
    installed = sorted(installed_connectors())
    if module is None and name not in installed:
        every = [*known, *installed]
        raise ConfigError(
            f"kv_transfer_config has the kv_connector {name!r}.{did_you_mean(name, every)} There are {', '.join(every)}"
            f"; one's own is an entry point of the group {GROUP}, or has a kv_connector_module_path."
        )
