"""`jaxpaged bench`: how fast a server, an engine and its start are. The guide is guides/measuring.md."""

from typing import Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.tools.bench import latency, serve, startup, sweep, throughput

KINDS = (serve, sweep, throughput, latency, startup)


def add_parser(commands: Any) -> None:
    group: Parser = commands.add_parser("bench", help="measure a server under load, an engine, or its start")
    kinds = group.add_commands(dest="kind", metavar="KIND")
    for kind in KINDS:
        kind.add_parser(kinds)
