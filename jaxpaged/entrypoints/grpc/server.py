"""The gRPC server: where it listens, its limits, and how it comes to rest.

This module knows grpcio's server and no method.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from jaxpaged.entrypoints.grpc.admin import Administration
from jaxpaged.entrypoints.grpc.inference import Inference
from jaxpaged.entrypoints.grpc.methods import Access, CallCounts, handlers
from jaxpaged.entrypoints.grpc.open_calls import HealthChecks, Reflection
from jaxpaged.errors import UsageError
from jaxpaged.proto import jaxpaged_pb2 as pb
from jaxpaged.serving.service import Service

INFERENCE, ADMIN = (pb.DESCRIPTOR.services_by_name[name] for name in ("Inference", "Admin"))
CLOSING_SECONDS = 5.0
"""What calls get when nothing is under way any more, to receive their last messages."""
MAX_STREAMS = 1024
"""Calls under way on one connection."""
MAX_CALLS = 16384
"""Calls under way on all of them."""
NO_ADMIN = "Administration is closed on this server. It opens with --grpc-admin-key-file, for those who have its keys."
OPTIONS = {
    "grpc.so_reuseport": 0,  # a second server on this port is an error
    "grpc.max_concurrent_streams": MAX_STREAMS,
    "grpc.server.max_pending_requests": MAX_CALLS,  # above it, 1,000 by default, anybody's calls are ended at random
    "grpc.server.max_pending_requests_hard_limit": MAX_CALLS,
    "grpc.keepalive_time_ms": 60_000,
    "grpc.keepalive_timeout_ms": 20_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.server_handshake_timeout_ms": 20_000,  # for TLS, and for the first frame of HTTP/2
    "grpc.max_connection_idle_ms": 300_000,  # without a call; clients connect again by themselves
    "grpc.max_metadata_size": 16 * 2**10,
    "grpc.absolute_max_metadata_size": 64 * 2**10,
}


class GrpcListener:
    """Serves on the addresses from `listen` on, until `should_exit` is set. `credentials` None: without TLS."""

    def __init__(
        self,
        service: Service,
        addresses: Sequence[str],
        *,
        keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int | None = None,
    ):
        self._service = service
        self._max_connections = max_connections or service.options.max_connections
        self._addresses = addresses
        self._keys, self._admin_keys = keys, admin_keys
        self._credentials = credentials
        self._stop = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.ports: list[int] = []

    @property
    def should_exit(self) -> bool:
        return self._stop.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._stop.set()

    async def listen(self) -> None:
        """From now on calls are answered. Raises UsageError for an address that cannot be had."""
        server = self._made()
        self.ports = [self._bound(server, address) for address in self._addresses]
        for path in self._paths:
            os.chmod(path, 0o660)  # as the Unix socket of HTTP
        await server.start()
        self._server = server

    async def run_until_stopped(self) -> None:
        """Serve, having listened, until `should_exit` is set."""
        assert self._server is not None, "listen comes first"
        try:
            await self._stop.wait()
        finally:
            await self._server.stop(CLOSING_SECONDS)
            for path in self._paths:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    @property
    def _paths(self) -> list[str]:
        """Of the addresses that are Unix sockets."""
        return [each.removeprefix("unix:") for each in self._addresses if each.startswith("unix:")]

    def _made(self) -> grpc.aio.Server:
        limits = {
            "grpc.max_receive_message_length": self._service.max_body_bytes,
            "grpc.max_send_message_length": -1,
            "grpc.max_allowed_incoming_connections": self._max_connections,
        }
        counts, traced = CallCounts(), self._service.is_tracing
        self._service.sources.append(counts.read)
        server = grpc.aio.server(
            handlers=[
                handlers(INFERENCE, Inference(self._service), Access(self._keys), counts, traced),
                handlers(ADMIN, Administration(self._service), Access(self._admin_keys, NO_ADMIN), counts),
            ],
            options=list({**OPTIONS, **limits}.items()),
            maximum_concurrent_rpcs=MAX_CALLS,
            compression=grpc.Compression.NoCompression,
        )
        own = [INFERENCE.full_name, ADMIN.full_name]
        health_pb2_grpc.add_HealthServicer_to_server(HealthChecks(self._service, own), server)
        names = [*own, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(Reflection(names), server)
        return server

    def _bound(self, server: grpc.aio.Server, address: str) -> int:
        try:
            if self._credentials is None:
                return server.add_insecure_port(address)
            return server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise UsageError(f"cannot listen on {address} for gRPC: {error}. Choose another --grpc-port.") from None


def grpc_credentials(tls: Mapping[str, Any]) -> Any:
    """The TLS of HTTP, see `http/transport/tls.py`; None without it. gRPC does not check what is not needed."""
    if not tls:
        return None
    certificate, key, authorities = (tls[f"ssl_{name}"] for name in ("certfile", "keyfile", "ca_certs"))
    chain = Path(certificate).read_bytes()
    return server_credentials(
        chain,
        Path(key).read_bytes() if key else chain,
        Path(authorities).read_bytes() if authorities else None,
        require_client=tls["ssl_cert_reqs"] == ssl.CERT_REQUIRED,
    )


def server_credentials(
    certificate: bytes, key: bytes, authorities: bytes | None = None, *, require_client: bool = False
) -> Any:
    """TLS with this certificate chain and key (PEM); `authorities` sign the certificates of clients."""
    return grpc.ssl_server_credentials([(key, certificate)], authorities, require_client)
