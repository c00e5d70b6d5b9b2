"""A server on loopback that answers each connection by a script, and the network as a fetcher under test sees it."""

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

PUBLIC = "93.184.215.14"


class LocalServer:
    """Runs `script(connection, request)` for each connection. It keeps the requests, and the names of TLS."""

    def __init__(self, script: Callable[[socket.socket, bytes], None], tls: ssl.SSLContext | None = None):
        self.requests: list[bytes] = []
        self.names: list[str | None] = []
        self._script, self._tls = script, tls
        if tls is not None:
            tls.sni_callback = lambda _connection, name, _context: self.names.append(name)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            connection.settimeout(20)
            if self._tls is not None:
                connection = stack.enter_context(self._tls.wrap_socket(connection, server_side=True))
            request = b""
            while b"\r\n\r\n" not in request:
                piece = connection.recv(4096)
                if not piece:
                    return
                request += piece
            self.requests.append(request)
            self._script(connection, request)

    def close(self) -> None:
        self._listener.close()


class Network:
    """Names and addresses that are not the system's: every public address is the local server.

    `answers` has one list of addresses a look-up, the last one for all that follow.
    """

    def __init__(self, server: LocalServer, *answers: list[str]):
        self._server, self._answers = server, list(answers or ([PUBLIC],))
        self.resolved: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int]] = []

    def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append((host, port))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        self.connected.append((address, port))
        return socket.create_connection(("127.0.0.1", self._server.port), timeout=seconds)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for one name that signs itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key
