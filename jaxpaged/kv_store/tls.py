"""TLS between engines that lend pages to each other: the files that options name, and what goes wrong with a peer.

Who lends shows a certificate that names the host by which others reach it (a subject alternative name), and who borrows
checks it by `kv_ssl_ca_certs`. A producer that has authorities too asks consumers for certificates in turn.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxpaged.errors import ConfigError, PageError

FIRST_BYTES = (b"\x16\x03", b"\x15\x03")
"""How a greeting and a refusal of TLS begin."""
SPEAKS_TLS = (
    "The peer speaks TLS, and this engine does not. Give both kv_ssl_ca_certs, and the one that lends kv_ssl_certfile."
)


@dataclass(frozen=True)
class TlsFiles:
    """Files in PEM format: our certificate, its key if that is not in the same one, and the certificates of who signs
    those of other engines."""

    certificate: str | None = None
    key: str | None = None
    authorities: str | None = None

    def check(self, *, lends: bool) -> None:
        """Raise ConfigError for files that do not serve."""
        self.lending() if lends else self.borrowing()

    def lending(self) -> ssl.SSLContext:
        """What a producer shows, and asks for. Raises ConfigError for files that do not serve."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context)
        if self.authorities is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def borrowing(self) -> ssl.SSLContext:
        """What a consumer checks, and shows if it is asked. Raises ConfigError for files that do not serve."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates, and the host that they name
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        for name in ("certificate", "key", "authorities"):
            if (file := getattr(self, name)) is not None:
                check_readable(OPTIONS[name], file)
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key, password=lambda: b"")  # nobody is there to be asked
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"kv_ssl_certfile {self.certificate} and kv_ssl_keyfile {self.key} are no certificate and its key: "
                f"{error}."
            ) from None
        try:
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"kv_ssl_ca_certs is {self.authorities}, which holds no certificates: {error}.") from None


OPTIONS = {"certificate": "kv_ssl_certfile", "key": "kv_ssl_keyfile", "authorities": "kv_ssl_ca_certs"}


def check_readable(option: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{option} is {file}, which cannot be read: {error.strerror}.") from None


def shake_hands(connection: ssl.SSLSocket) -> None:
    """Raises PageError where the peer has none of the certificates that it should, or speaks no TLS, and OSError."""
    try:
        connection.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise ConnectionError("the peer closed the connection") from None
    except ssl.SSLError as error:
        raise refusal(error) from None


def hung_up(error: OSError) -> PageError:
    """What to say of a peer that ends the connection in place of a greeting."""
    return PageError(
        f"The peer hung up on the greeting by TLS: {error}. Does it have TLS (kv_ssl_certfile), and ask for "
        "certificates that this engine has not (kv_ssl_ca_certs)?"
    )


def hung_up_without(error: OSError) -> ConnectionError:
    """The same where this engine speaks no TLS."""
    return ConnectionError(
        f"it hung up on the greeting, which was none by TLS: {error}. If it has TLS (kv_ssl_certfile), give this "
        "engine kv_ssl_ca_certs with who signs its certificate"
    )


def refusal(error: ssl.SSLError) -> PageError:
    """What to say of a failure of TLS."""
    reason = getattr(error, "verify_message", None) or (error.reason or str(error)).replace("_", " ").lower()
    return PageError(
        f"TLS with the peer fails: {reason}. Check kv_ssl_certfile, kv_ssl_keyfile and kv_ssl_ca_certs of both, and "
        "the host that the certificate names."
    )
