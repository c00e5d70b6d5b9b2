"""The server that is measured: found by the flags, waited for, and asked.

This module knows flags as attributes, and neither loads nor figures.
"""

import argparse
import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxpaged.entrypoints.cli.server_answers import ServerError
from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.entrypoints.terminal import complain
from jaxpaged.errors import UsageError
from jaxpaged.tools.bench import report
from jaxpaged.tools.bench.backends import Asked, Backend, GrpcBackend, HttpBackend
from jaxpaged.tools.bench.client_text import ClientText, load_client_text
from jaxpaged.tools.bench.flags import HTTP_ENDPOINTS, MADE_UP, SAMPLING
from jaxpaged.tools.bench.requests import BenchRequest, Outcome

COMMAND = "jaxpaged bench"
TEST_PROMPT = "Hello"


@dataclass
class Server:
    """A server that answers, and the model that is asked. `model_id` is what it is called, or made from."""

    backend: Backend
    asked: Asked
    model_id: str
    tokenizer_id: str | None
    text: ClientText
    id_prefix: str

    async def send(self, request: BenchRequest, number: int) -> Outcome:
        return await self.backend.send(request, self.asked, f"{self.id_prefix}{number}")

    def asking(self, name: str, fields: Mapping[str, Any]) -> "Server":
        """The same server, asked for further fields, with other request ids."""
        asked = replace(self.asked, fields={**self.asked.fields, **fields})
        return replace(self, asked=asked, id_prefix=f"{self.id_prefix}{name}-")


@contextlib.asynccontextmanager
async def open_server(args: argparse.Namespace) -> AsyncIterator[Server]:
    """The server of the flags, once it is ready. Raises UsageError and ServerError.

    A short request comes first: it finds a wrong model, key or field before a thousand fail.
    """
    fields = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    asked = Asked(
        args.served_model_name or args.model or "",
        args.ignore_eos or args.dataset_name in MADE_UP,
        args.logprobs,
        {**fields, **args.extra_body},
    )
    chat = args.backend in ("openai-chat", "grpc-chat")
    backend = grpc_backend(args, chat) if args.backend.startswith("grpc") else http_backend(args, chat)
    try:
        await wait_until_ready(backend, args.ready_check_timeout_sec)
        model_id = args.model
        if model_id is None:
            name, model_id = await backend.first_model()
            asked = replace(asked, model=args.served_model_name or name)
        prefix = args.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-"
        tested = await backend.send(BenchRequest(TEST_PROMPT, 1, 1), asked, f"{prefix}test")
        if not tested.success:
            raise ServerError(f"the first request failed: {tested.error}")
        tokenizer_id = None if args.skip_tokenizer_init else args.tokenizer or model_id
        text = ClientText(None, chat=chat) if tokenizer_id is None else load_client_text(tokenizer_id, chat)
        yield Server(backend, asked, model_id, tokenizer_id, text, prefix)
    finally:
        await backend.close()


def http_backend(args: argparse.Namespace, chat: bool) -> Backend:
    endpoint = args.endpoint or HTTP_ENDPOINTS[args.backend]
    if endpoint.endswith("chat/completions") != chat or not endpoint.endswith("completions"):
        raise UsageError(
            f"--endpoint is {endpoint}; that of --backend {args.backend} is {HTTP_ENDPOINTS[args.backend]}."
        )
    allow_many_connections()
    return HttpBackend(http_client(args, args.base_url), "/" + endpoint.lstrip("/"), chat)


def http_client(args: argparse.Namespace, url: str | None) -> Any:
    """A client of the server at `url`, or else at host and port, with the key and the headers of the flags."""
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= report.pairs_of(args.header, "--header")
    url = (url or f"http://{bracketed(args.host)}:{args.port or 8000}").rstrip("/").removesuffix("/v1")
    return HttpClient(url, headers, insecure=args.insecure, ca_certificate=args.ca_certificate)


def admin_client(args: argparse.Namespace) -> Any:
    """A client of the server's administration, which is over HTTP. Raises UsageError where it is not said where."""
    if args.backend.startswith("grpc") and args.admin_base_url is None:
        raise UsageError(f"--profile asks over HTTP. With --backend {args.backend} give --admin-base-url too.")
    return http_client(args, args.admin_base_url or args.base_url)


def grpc_backend(args: argparse.Namespace, chat: bool) -> Backend:
    from jaxpaged.client import AsyncClient

    if args.endpoint or args.header or args.insecure:
        raise UsageError(f"--endpoint, --header and --insecure are for HTTP, not for --backend {args.backend}.")
    target = args.base_url or f"{bracketed(args.host)}:{args.port or 50051}"
    if "://" in target:
        raise UsageError(f"--base-url is {target}; for gRPC it is host:port or unix:/path.")
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    try:
        client = AsyncClient(target, api_key=key, ca_certificate=args.ca_certificate, retries=0)
    except OSError as error:
        raise UsageError(f"cannot read --ca-certificate {args.ca_certificate}: {error.strerror}.") from None
    return GrpcBackend(client, target, chat)


def allow_many_connections() -> None:
    """Every connection is an open file, of which the system allows a process 1024 at first, in many places."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


async def wait_until_ready(backend: Backend, timeout: float) -> None:
    """Wait for a server that starts; without a timeout only say that it is not ready. Raises ServerError."""
    end = time.monotonic() + timeout
    while True:
        try:
            obstacle = await backend.obstacle()
        except ServerError as error:
            if time.monotonic() >= end:
                raise
            obstacle = str(error)
        if obstacle is None:
            return
        if time.monotonic() >= end:
            if timeout > 0:
                raise ServerError(f"the server is not ready after {timeout:g} s: {obstacle}")
            complain(
                COMMAND, f"the server is not at full speed yet: {obstacle} Wait for it: --ready-check-timeout-sec 300"
            )
            return
        await asyncio.sleep(min(1.0, timeout / 10))
