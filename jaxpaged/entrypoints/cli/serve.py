"""`jaxpaged serve`: the engine behind HTTP, with the OpenAI API.

This module knows flags, and how engine and server are put together; what is served is the business of
`entrypoints/http/`.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.cli.flags import Parser, add_engine_flags, add_flag, shown_default

if TYPE_CHECKING:
    from jaxpaged.entrypoints.http.options import ServerOptions

EPILOG = """\
The server listens on this machine only, unless --host says otherwise; then give it --api-key-file.
Ctrl-C, or SIGTERM, lets requests under way finish; a second one ends them.

examples:
  jaxpaged serve
  jaxpaged serve Qwen/Qwen3-0.6B --max-model-len 8K --port 9000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of Portugal?"}]}'
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "serve", help="answer requests over HTTP", usage="%(prog)s [MODEL] [options]", epilog=EPILOG
    )
    parser.add_argument("served_model", nargs="?", metavar="MODEL",
                        help="a folder in Hugging Face format, a hub id, or 'demo'; the same as --model")  # fmt: skip
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    add_server_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run, command_parser=parser)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of the server."""
    from jaxpaged.entrypoints.http.options import ServerOptions

    group = parser.add_argument_group("server")
    for option in dataclasses.fields(ServerOptions):
        add_flag(group, option.name, option.type, option.metadata["help"] + shown_default(option.default),
                 option.metadata.get("choices"))  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status."""
    from jaxpaged.entrypoints.http.options import ServerOptions

    check_extra()
    from jaxpaged.entrypoints.http import server
    from jaxpaged.entrypoints.http.service import Service, served_model

    options = ServerOptions.from_options(server_options(args))
    keys = server.api_keys(options)
    with contextlib.closing(server.Sockets(options)) as sockets:
        engine = load_engine(engine_options_of(args), options)
        try:
            service = Service(engine, served_model(engine.config, options.served_model_name), options)
            sockets.listen()
            announce(service.model.names[0], sockets.urls, guarded=bool(keys))
            run_loop(server.serve(service, sockets, keys))
        finally:
            engine.shutdown()
    return 0


def check_extra() -> None:
    """Raise UsageError when the libraries of the server are not installed."""
    from importlib.util import find_spec

    from jaxpaged.errors import UsageError

    missing = [name for name in ("starlette", "uvicorn", "httptools") if find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}. Install them with: pip install 'jaxpaged[serve]'")


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the server."""
    from jaxpaged.entrypoints.http.options import ServerOptions

    names = [option.name for option in dataclasses.fields(ServerOptions)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def engine_options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options. Raises UsageError for two models."""
    from jaxpaged.entrypoints.cli.flags import engine_options
    from jaxpaged.errors import UsageError

    options = engine_options(args)
    if args.served_model is not None:
        if hasattr(args, "model"):
            raise UsageError(f"two models are given, {args.served_model} and --model {args.model}. Leave one out.")
        options["model"] = args.served_model
    return options


def load_engine(options: Mapping[str, Any], server: "ServerOptions") -> Any:
    """The engine, loaded. Raises ConfigError, CheckpointError or CapacityError."""
    from jaxpaged.entrypoints.cli.terminal import ProgressLine

    progress = ProgressLine()
    try:
        return open_async_engine(options, progress.update, server.step_timeout, server.max_restarts)
    finally:
        progress.close()


def open_async_engine(options: Mapping[str, Any], progress: Any, step_timeout: float, max_restarts: int) -> Any:
    """An `AsyncLLM`; tests put an engine without a model in its place."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_llm import AsyncLLM

    return AsyncLLM.from_config(
        EngineConfig.from_options(**options), progress, step_timeout=step_timeout, max_restarts=max_restarts
    )


def announce(model: str, urls: list[str], guarded: bool) -> None:
    import sys

    keys = "an API key is needed" if guarded else "whoever reaches it may ask, no API key is needed"
    print(f"{model} is served at {urls[0]} ({keys}). Ctrl-C stops it.", file=sys.stderr, flush=True)
    for url in urls[1:]:
        print(f"The admin endpoints are at {url}.", file=sys.stderr, flush=True)


def run_loop(serving: Any) -> None:
    """Run on uvloop where it is installed: it streams 1.2 times as many events a second."""
    import asyncio
    from importlib.util import find_spec

    factory = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serving)
