"""`--server`: commands that ask a server over gRPC, in place of an engine of their own.

This module knows flags, how the client of `jaxpaged.client` is made from them, and what its errors mean to a person.
Importing it imports no client.
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpaged.entrypoints.cli.flags import chosen_model, engine_options
from jaxpaged.errors import JaxpagedError, RequestError, ServerError, UsageError

if TYPE_CHECKING:  # --help must not wait for grpcio
    from jaxpaged.client import Client, ClientError
    from jaxpaged.proto import jaxpaged_pb2 as pb

OPENING_RETRIES, RETRIES = 1, 4
MOST_NAMED = 20
"""Models of a server that a person is told."""
SERVER_FLAGS = ("api_key_file", "ssl", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "timeout")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a server in place of an engine")
    group.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="address of a server that was started with --grpc-port, "
        "or unix:PATH; it answers, and a model is a name that it knows (extra grpc)",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="file whose first line is the server's API key")
    group.add_argument("--ssl", action="store_true", help="use TLS, and trust the well-known authorities")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="use TLS, and trust the authorities in this file (PEM)")
    group.add_argument("--ssl-certfile", metavar="FILE", help="use TLS, and show this certificate (PEM)")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="file with the certificate's key")
    group.add_argument("--timeout", metavar="SECONDS", type=float, help="longest time for an answer (default: none)")


def check_server_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that only say how a server is asked, where none is."""
    given = [name for name in SERVER_FLAGS if getattr(args, name) not in (None, False)]
    if given and args.server is None:
        raise UsageError(f"{flag_of(given[0])} is for --server, which is not given. Leave it out.")


def refuse_engine_options(args: argparse.Namespace, place: str, *others: str) -> None:
    """Raise UsageError for options of an engine where `place` is a flag that names a server. `others` are flags of the
    command that need an engine too."""
    own = [name for name in engine_options(args, {}) if name != "model"] + (["config"] if args.config else [])
    own += [name for name in others if getattr(args, name)]
    if own:
        raise UsageError(
            f"{flag_of(own[0])} is an option of an engine, and with {place} the server has its own. Leave it out."
        )


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def asking(args: argparse.Namespace) -> Iterator[tuple["Client", "pb.GetModelInfoResponse"]]:
    """A client for the server of --server, and what the server says of its model.

    Raises UsageError for flags that do not serve, and ServerError when the server does not answer.
    """
    from jaxpaged.entrypoints.cli.serve import check_extra

    check_extra("grpc", "grpc")
    from jaxpaged.client import Client, ClientError

    settings = {
        "api_key": key_in(args.api_key_file) or getattr(args, "api_key", None),
        "tls": args.ssl,
        "ca_certificate": args.ssl_ca_certs,
        "certificate": args.ssl_certfile,
        "private_key": args.ssl_keyfile,
        "timeout": args.timeout,
    }
    if ":" not in args.server:  # to which gRPC would add port 443
        raise UsageError(f"--server is {args.server!r}; it must be HOST:PORT or unix:PATH.")
    if args.timeout is not None and args.timeout <= 0:
        raise UsageError(f"--timeout is {args.timeout:g}; it must be more than 0.")
    try:
        with Client(args.server, retries=OPENING_RETRIES, **settings) as client:
            model = client.model_info()
            name = chosen_model(args)
            known = [*model.names, *(each.name for each in model.lora_adapters)]
            if name is not None and name not in known:
                raise UsageError(f"the server has no model {name!r}. It has {', '.join(known[:MOST_NAMED])}.")
        with Client(args.server, retries=RETRIES, **settings) as client:
            yield client, model
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}. Check the --ssl flags.") from None
    except ClientError as error:
        raise told(error, args.server) from None


def key_in(file: str | None) -> str | None:
    """Raises UsageError for a file without a key."""
    if file is None:
        return None
    try:
        key = next(iter(Path(file).read_text(encoding="utf-8").split()), "")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot read {file}: {reason}. Check --api-key-file.") from None
    if not key:
        raise UsageError(f"{file} holds no key. Write it there, or leave out --api-key-file.")
    return key


def told(error: "ClientError", server: str) -> JaxpagedError:
    """What a person is told of a call that failed: RequestError where the request is at fault, else ServerError."""
    match error.code:
        case "INVALID_ARGUMENT" | "NOT_FOUND" | "OUT_OF_RANGE":
            return RequestError(error.message, error.field)
        case "UNAVAILABLE":
            return ServerError(f"no answer from {server}: {error.message.rstrip('.')}. Is the server running there?")
        case "UNAUTHENTICATED":
            return ServerError(f"{server} answers: {error.message} Give its key with --api-key-file.")
        case "DEADLINE_EXCEEDED":
            return ServerError("the answer took longer than --timeout allows. Allow more.")
        case "UNIMPLEMENTED":
            return ServerError(f"{server} is no server of jaxpaged: {error.message}. Check --server.")
        case _:
            return ServerError(f"{server} answers {error.code}: {error.message}")
