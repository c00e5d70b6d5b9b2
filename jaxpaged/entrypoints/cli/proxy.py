"""`jaxpaged proxy`: one address for engines that compute prompts and engines that generate."""

import argparse
import asyncio
import signal
import sys
from typing import Any

from jaxpaged.entrypoints.cli.flags import Parser
from jaxpaged.entrypoints.cli.serve import check_extra

EPILOG = """\
Short prompts go to a decode engine straight away, and so does everything while no prefill engine answers. Requests keep
their Authorization header, so the engines' keys are the clients'. Ctrl-C, or SIGTERM, ends it.

example:
  jaxpaged serve --port 8100 --kv-role kv_producer
  jaxpaged serve --port 8200 --kv-role kv_consumer
  jaxpaged proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "proxy", help="one address for engines that compute prompts and engines that generate", epilog=EPILOG
    )
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="engines with --kv-role kv_producer")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="engines with --kv-role kv_consumer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0: any (default: 8000)")
    parser.add_argument(
        "--min-prefill-tokens", type=int, default=256, metavar="N",
        help="shorter prompts, at about 4 bytes a token, go to decode engines straight away (default: 256)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds an answer may take (default: 3600)"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and log debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status; raises UsageError for what is no address."""
    check_extra("serve", "starlette", "uvicorn", "httptools")
    from jaxpaged.entrypoints.http.transport.listener import MAX_CONNECTIONS, Listener, bind, url_of
    from jaxpaged.entrypoints.proxy.app import Proxy, create_app
    from jaxpaged.entrypoints.proxy.backends import Backends

    prefill, decode = Backends(args.prefill), Backends(args.decode)
    proxy = Proxy(prefill, decode, least=args.min_prefill_tokens, timeout=args.timeout)
    bound = bind(args.host, args.port)

    async def serve() -> None:
        listener = Listener(create_app(proxy), bound, max_header_bytes=1 << 16, max_connections=MAX_CONNECTIONS)
        await listener.listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(listener, "should_exit", True))
        names = f"{len(prefill.all)} prefill and {len(decode.all)} decode engines"
        print(f"{names} are served at {url_of(bound)}", file=sys.stderr, flush=True)
        await listener.run_until_stopped()
        await prefill.close()
        await decode.close()

    asyncio.run(serve())
    return 0
