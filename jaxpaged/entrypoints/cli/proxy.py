"""`jaxpaged proxy`: one address for engines that compute prompts and engines that generate."""

import argparse
import asyncio
import dataclasses
import signal
import sys
from typing import TYPE_CHECKING, Any

from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli.serve import check_extra
from jaxpaged.entrypoints.option_flags import add_flag, shown_default
from jaxpaged.errors import UsageError

if TYPE_CHECKING:
    from jaxpaged.entrypoints.proxy.backends import Backends

SERVER_OPTIONS = (
    "host",
    "port",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "api_key",
    "api_key_file",
    "max_body_bytes",
    "max_connections",
)
"""Those of the server's options that the proxy has too."""
EPILOG = """\
Prompts of completions and chats are computed by prefill engines. Short ones go to a decode engine straight away, and so
does everything while no prefill engine answers, and whatever else is asked (/v1/responses, /v1/messages, /tokenize,
/v1/embeddings, ...). While no decode engine answers, nothing is computed. Engines get the clients' keys (Authorization,
x-api-key), unless --engine-key-file gives them one. An engine of --start that ends is started again. Ctrl-C, or
SIGTERM, ends it.

examples:
  jaxpaged proxy --start 1p1d
  jaxpaged proxy --start 2p1d -- MODEL --max-model-len 8k

  jaxpaged serve --port 8100 --kv-role kv_producer
  jaxpaged serve --port 8200 --kv-role kv_consumer
  jaxpaged proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "proxy", help="one address for engines that prefill and engines that decode", epilog=EPILOG
    )
    parser.add_argument("--prefill", nargs="+", default=[], metavar="URL", help="engines with --kv-role kv_producer")
    parser.add_argument("--decode", nargs="+", default=[], metavar="URL", help="engines with --kv-role kv_consumer")
    parser.add_argument(
        "--start",
        metavar="XPYD",
        help="in place of both: start X engines for prompts and Y that generate here, such as 1p1d, which end with the "
        "proxy",
    )
    parser.add_argument(
        "serve",
        nargs="*",
        metavar="-- ARGUMENT",
        help="what each engine of --start is given: arguments of jaxpaged serve",
    )
    parser.add_argument(
        "--min-prefill-tokens",
        type=int,
        default=256,
        metavar="N",
        help="shorter prompts, at about 4 bytes a token, go to decode engines straight away (default: 256)",
    )
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="S", help="seconds an answer may take (default: 3600)"
    )
    parser.add_argument(
        "--wait-for-prefill",
        action="store_true",
        help="ask a decode engine once a prompt is computed; by default it fetches what there is of it meanwhile",
    )
    add_server_flags(parser)
    group = parser.add_argument_group("engines at https://")
    group.add_argument(
        "--engine-key-file", metavar="FILE", help="with the key that engines get in place of the clients'"
    )
    group.add_argument("--engine-ca-certs", metavar="FILE", help="certificates of who signs those of the engines (PEM)")
    group.add_argument(
        "--engine-certfile", metavar="FILE", help="the proxy's own certificate, for engines that ask for it"
    )
    group.add_argument("--engine-keyfile", metavar="FILE", help="its key, if it is not in the same file")
    parser.add_argument("--debug", action="store_true", help="show tracebacks, and log debug messages")
    parser.set_defaults(run=run, command_parser=parser)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for those of the server's options that the proxy has."""
    from jaxpaged.serving.options import ServerOptions

    group = parser.add_argument_group("server")
    for option in dataclasses.fields(ServerOptions):
        if option.name in SERVER_OPTIONS:
            add_flag(
                group,
                option.name,
                option.type,
                option.metadata["help"] + shown_default(option.default),
                option.metadata.get("choices"),
                several=True,
            )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns the exit status; raises UsageError for what is no address."""
    check_extra("serve", "starlette", "uvicorn", "httptools")
    if args.start is None:
        if args.serve or not args.decode:
            what = f"{args.serve[0]!r} stands there" if args.serve else "no engine is named"
            raise UsageError(f"{what}. Give --decode URL ..., or --start 1p1d and arguments of the engines behind --.")
        return serve(args)
    if args.prefill or args.decode:
        raise UsageError("--start is given, and engines are named. Leave one of them out.")
    from jaxpaged.entrypoints.proxy.local_engines import local_engines

    with local_engines(args.start, args.serve) as (args.prefill, args.decode):
        return serve(args)


def serve(args: argparse.Namespace) -> int:
    """The same before engines that run."""
    from jaxpaged.entrypoints.http.server import api_keys
    from jaxpaged.entrypoints.http.transport.listener import Listener, bind, url_of
    from jaxpaged.entrypoints.http.transport.tls import tls_settings
    from jaxpaged.entrypoints.proxy.app import MAX_BODY_BYTES, Proxy, create_app
    from jaxpaged.serving.options import ServerOptions

    options = ServerOptions.from_options({name: getattr(args, name) for name in SERVER_OPTIONS if hasattr(args, name)})
    keys, tls = api_keys(options), tls_settings(options)
    prefill, decode = engines(args)
    bound = bind(options.host, options.port)

    async def run_until_stopped() -> None:
        proxy = Proxy(
            prefill,
            decode,
            least=args.min_prefill_tokens,
            timeout=args.timeout,
            has_key=args.engine_key_file is not None,
            max_body_bytes=options.max_body_bytes or MAX_BODY_BYTES,
            waits=args.wait_for_prefill,
        )
        listener = Listener(
            create_app(proxy, keys), bound, max_header_bytes=1 << 16, max_connections=options.max_connections, tls=tls
        )
        await listener.listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: setattr(listener, "should_exit", True))
        names = f"{len(prefill.all)} prefill and {len(decode.all)} decode engines"
        print(f"{names} are served at {url_of(bound, 'https' if tls else 'http')}", file=sys.stderr, flush=True)
        await listener.run_until_stopped()
        await prefill.close()
        await decode.close()

    asyncio.run(run_until_stopped())
    return 0


def engines(args: argparse.Namespace) -> tuple["Backends", "Backends"]:
    """Those that compute prompts, and those that generate. Raises UsageError for files that do not serve."""
    from jaxpaged.entrypoints.http.server import keys_in
    from jaxpaged.entrypoints.proxy.backends import Backends

    headers, tls = {}, {"ca_certificate": args.engine_ca_certs, "certificate": None}
    if args.engine_key_file is not None:
        headers["Authorization"] = f"Bearer {keys_in(args.engine_key_file, '--engine-key-file')[0]}"
    if args.engine_certfile is not None:
        tls["certificate"] = (args.engine_certfile, args.engine_keyfile)
    elif args.engine_keyfile is not None:
        raise UsageError("--engine-keyfile is given without a certificate. Add --engine-certfile, or leave it out.")
    if not any(url.startswith("https:") for url in (*args.prefill, *args.decode)) and any(tls.values()):
        raise UsageError("certificates are given for engines, but none is at https://. Leave them out.")
    return Backends(args.prefill, headers, tls), Backends(args.decode, headers, tls)
