"""Options that name code of the operator's."""

from dataclasses import dataclass

from jaxpaged.config.option_checks import option


@dataclass(frozen=True)
class PluginConfig:
    """What is loaded besides the package. Code comes from here only, never from a checkpoint or a request."""

    plugin: tuple[str, ...] = option(
        (),
        "plugins of one's own, each a Python file (my_model.py) or 'module:NAME'. Guide: guides/extending.md",
        several=True,
    )
    plugins: tuple[str, ...] | None = option(
        None,
        "names of the installed plugins that load (default: those of the groups jaxpaged.general_plugins and "
        "jaxpaged.stat_logger_plugins); an empty text means none",
        several=True,
    )
    worker_extension_cls: str | None = option(
        None,
        "class whose methods collective_rpc calls in every process that computes, as 'module:Class'",
        aliases={"": None},
    )
    queue_policy: str | None = option(
        None,
        "name of a plugin's queue policy, which gives requests their priority; with scheduling_policy priority",
        not_empty=True,
    )
    io_processor_plugin: str | None = option(
        None,
        "name of a plugin's I/O processor, by which a model that pools takes data of another kind; see "
        "guides/extending.md",
        not_empty=True,
    )
