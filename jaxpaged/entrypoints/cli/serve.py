"""`jaxpaged serve`: the engine behind HTTP, with the OpenAI API, and behind gRPC.

This module knows flags, and how engine and server are put together; what is served is the business of
`entrypoints/http/`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxpaged.engine.observability.log_setup import set_up_logging
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.flags import add_model_argument, engine_options
from jaxpaged.entrypoints.option_flags import add_engine_flags, add_flag, add_foreign_flags, shown_default, whole_number
from jaxpaged.entrypoints.terminal import ERASE_LINE, ProgressLine
from jaxpaged.errors import UsageError, how_to_install, is_installed

if TYPE_CHECKING:
    from jaxpaged.entrypoints.http.server import Sockets
    from jaxpaged.parsing.parser import Formats
    from jaxpaged.serving.service import Service

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.001
"""How long a thread computes before another has the interpreter: 5 ms in Python. The event loop waits for the turns of
all threads that compute, after each of its looks at its sockets."""
NEW_OBJECTS = 50_000
"""After which the garbage collector looks at the new ones: 700 in Python. A request over HTTP makes 160 that end with
it, none of which holds itself, so where 300 are under way the collector finds nothing and takes a tenth of the time."""
COLLECT_SECONDS = 10.0
"""How often the garbage collector looks at all: each call of gRPC leaves 5 objects that hold each other (grpcio's), so
a server would grow for hours. Looking takes milliseconds."""
EPILOG = """\
The server listens on this machine only, unless --host says otherwise; then give it --api-key-file.
Ctrl-C, or SIGTERM, lets requests under way finish; a second one ends them.

examples:
  jaxpaged serve
  jaxpaged serve Qwen/Qwen3-0.6B --max-model-len 8K --port 9000
  jaxpaged serve --grpc-port 50051
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "What is the capital of Portugal?"}]}'
"""
LOG_SECONDS = 5.0
"""Between two lines in the log."""
LOOK_SECONDS = 0.25
"""Between two looks at what the engine waits for."""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "serve", help="answer requests over HTTP and gRPC", usage="%(prog)s [MODEL] [options]", epilog=EPILOG
    )
    add_model_argument(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and log debug messages")
    add_server_flags(parser)
    add_engine_flags(parser, file_holds="server and engine options")
    parser.add_argument("-n", dest="nnodes", type=whole_number, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(run=run, command_parser=parser)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every option of the server."""
    from jaxpaged.serving.foreign_options import FOREIGN_SERVER_OPTIONS
    from jaxpaged.serving.options import ServerOptions

    group = parser.add_argument_group("server")
    for option in dataclasses.fields(ServerOptions):
        add_flag(
            group,
            option.name,
            option.type,
            option.metadata["help"] + shown_default(option.default),
            option.metadata.get("choices"),
            several=True,
        )
    add_foreign_flags(parser, FOREIGN_SERVER_OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status."""
    from jaxpaged.serving.options import ServerOptions, check_adapters

    check_extra("serve", "starlette", "uvicorn", "httptools")
    from jaxpaged.entrypoints.http import server
    from jaxpaged.serving.service import Service, served_model

    given, of_engine = split_options(args)
    options = ServerOptions.from_options(given, functools.partial(known_formats, of_engine))
    check_adapters(options, bool(of_engine.get("enable_lora")))
    set_up_logging("debug" if args.debug else options.log_level, options.log_format)
    if of_engine.get("node_rank"):
        from jaxpaged.config import EngineConfig
        from jaxpaged.engine.process.gathering import follow_other_host

        follow_other_host(EngineConfig.from_options(**of_engine))
        return 0
    if options.grpc_port is not None or options.grpc_uds is not None:
        check_extra("grpc", "grpc", "grpc_health", "grpc_reflection")
    keys = server.api_keys(options)
    admin_keys = server.keys_in(options.grpc_admin_key_file, "--grpc-admin-key-file")
    with contextlib.closing(server.Sockets(options)) as sockets, contextlib.closing(StartReport()) as report:
        report.waits("starting the engine")
        engine = open_async_engine(of_engine, report.update, options.step_timeout, options.max_restarts)
        try:
            model = served_model(engine.config, options.served_model_name)
            with contextlib.closing(Service(engine, model, options)) as service:
                announcement = functools.partial(announce, service, sockets, report, guarded=bool(keys))
                run_loop(server.serve(service, sockets, keys, admin_keys, on_listening=announcement))
        finally:
            engine.shutdown()
    return 0


def known_formats(of_engine: Mapping[str, Any]) -> "Formats":
    """The formats that parsers may have, those of plugins among them. Raises ConfigError."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.plugins.loading import load_plugins
    from jaxpaged.serving.formats import formats_of

    options = EngineConfig.from_options(**of_engine).plugins
    return formats_of(load_plugins(options.plugin, options.plugins))


def check_extra(extra: str, *modules: str) -> None:
    """Raise UsageError when modules that come with an extra are not installed."""
    missing = [name for name in modules if not is_installed(name)]
    if missing:
        raise UsageError(f"this needs {' and '.join(missing)}. To install what is missing, {how_to_install(extra)}.")


def split_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given for the server, and for the engine: those of the YAML file, overridden by flags.

    Raises ConfigError, and UsageError for two models.
    """
    from jaxpaged.entrypoints.cli.flags import read_config_file
    from jaxpaged.serving.foreign_options import FOREIGN_SERVER_OPTIONS
    from jaxpaged.serving.options import ServerOptions

    fields = dataclasses.fields(ServerOptions)
    file = read_config_file(args.config, fields, FOREIGN_SERVER_OPTIONS) if args.config else {}
    names = [*(option.name for option in fields), *FOREIGN_SERVER_OPTIONS]
    server = {name: file.pop(name) for name in names if name in file}
    server |= {name: getattr(args, name) for name in names if hasattr(args, name)}
    return server, engine_options(args, file, besides=names)


def open_async_engine(options: Mapping[str, Any], progress: Any, step_timeout: float, max_restarts: int) -> Any:
    """An `AsyncLLM`, loaded; tests put an engine without a model in its place. Raises ConfigError, CheckpointError or
    CapacityError."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_llm import AsyncLLM

    return AsyncLLM.from_config(
        EngineConfig.from_options(**options), progress, step_timeout=step_timeout, max_restarts=max_restarts
    )


def announce(service: "Service", sockets: "Sockets", report: "StartReport", guarded: bool) -> None:
    """Say where the model is served, and to whom; and, once it is so, that the server is ready."""
    model, is_logged = service.model.names[0], service.options.log_format == "json"
    keys = "an API key is needed" if guarded else "whoever reaches it may ask, no API key is needed"
    admin = [] if sockets.admin is None else sockets.urls[-1:]
    places = sockets.urls[: len(sockets.urls) - len(admin)]
    places = [f"at {url}" for url in places] + [f"over gRPC at {address}" for address in sockets.grpc_addresses]
    tell(f"{model} is served {' and '.join(places)} ({keys}). Ctrl-C stops it.", is_logged)
    for url in admin:
        tell(f"The admin endpoints are at {url}.", is_logged)
    waits_for_programs = service.options.ready_when == "compiled"
    waiting = asyncio.ensure_future(report.until_ready(lambda: service.engine.obstacle(waits_for_programs)))

    def say_ready(done: asyncio.Future[float]) -> None:
        if not done.cancelled():
            tell(f"{model} is ready, {done.result():.1f} s after the start.", is_logged)

    waiting.add_done_callback(say_ready)


def tell(line: str, is_logged: bool) -> None:
    """Say it to a person or, where standard error holds only JSON, in the log."""
    if is_logged:
        logger.info(line)
    else:
        print(ERASE_LINE if sys.stderr.isatty() else "", line, sep="", file=sys.stderr, flush=True)


def collect_garbage(loop: Any) -> None:
    """Now, and from now on every `COLLECT_SECONDS`."""
    gc.collect()
    loop.call_later(COLLECT_SECONDS, collect_garbage, loop)


def run_loop(running: Any) -> Any:
    """What a coroutine returns, run on uvloop where it is installed: it streams 1.2 times as many events a second.

    Threads that compute in Python, such as those that encode large answers, let others go on after `TURN_SECONDS`. What
    was loaded until now stays for good, so the garbage collector need not look at it again and again, and at what is
    new only after `NEW_OBJECTS`, and every `COLLECT_SECONDS`.
    """
    from concurrent.futures import ThreadPoolExecutor
    from importlib.util import find_spec

    from jaxpaged.engine.async_llm import NUM_THREADS

    gc.collect()
    gc.freeze()
    factory, turn, thresholds = None, sys.getswitchinterval(), gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *thresholds[1:])
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    sys.setswitchinterval(TURN_SECONDS)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, "background"))
            runner.get_loop().call_later(COLLECT_SECONDS, collect_garbage, runner.get_loop())
            return runner.run(running)
    finally:
        sys.setswitchinterval(turn)
        gc.set_threshold(*thresholds)


# ---- what a server waits for -----------------------------------------------------------------------


class StartReport:
    """From the start to `close`. `update` fits `messages.Progress` and may be called by several threads."""

    def __init__(self) -> None:
        self._line = ProgressLine()
        self._began = self._logged = time.monotonic()
        self._is_loading = True

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    def update(self, what: str, done: int, total: int) -> None:
        """Loading has come so far. What is told once somebody waits for readiness is not shown: that tells of all."""
        if self._is_loading:
            self.waits(f"loading: {what} {done / max(total, 1):.0%}")

    def waits(self, words: str) -> None:
        if self._line.open:
            self._line.show(words)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            logger.info("after %.0f s: %s", self.seconds, words)

    async def until_ready(self, obstacle: Callable[[], str | None]) -> float:
        """Wait until there is no `obstacle` to serving any more. Returns the seconds since the start."""
        self._is_loading = False
        while (reason := obstacle()) is not None:
            self.waits(f"not ready yet: {reason}")
            await asyncio.sleep(LOOK_SECONDS)
        self.close()
        return self.seconds

    def close(self) -> None:
        """Take the line away, for good."""
        self._line.close()
