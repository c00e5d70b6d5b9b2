"""Remote pictures and files of this machine, by URL: only those that the operator allows.

A client's URL makes this machine connect to somewhere, so every hop is checked: its scheme, its host's name, and each
address of that name, which is looked up once. The connection goes to an address that was checked, with the name in the
Host header and in TLS. Nothing is fetched until `allowed_media_domains` names hosts. Proxies of the environment are not
used. `fetch` blocks; the system's own time limits hold for looking up a name. Nothing here knows of pictures.
"""

import http.client
import ipaddress
import logging
import os
import re
import socket
import ssl
import stat
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from jaxpaged import __version__
from jaxpaged.errors import ConfigError, FetchError, RequestError, shown

logger = logging.getLogger(__name__)

HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")
REDIRECTS = (301, 302, 303, 307, 308)
PIECE = 1 << 16
TRANSLATED = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "192.88.99.0/24")))
"""6to4, Teredo and the relays of 6to4: addresses that carry another one."""


@dataclass(frozen=True)
class FetchLimits:
    """Of one URL with all its redirects."""

    max_bytes: int = 64 << 20
    seconds: float = 5.0
    max_redirects: int = 3


class Place(NamedTuple):
    """Where a URL of HTTP leads: its parts after they were checked."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == default_port(self.scheme) else f"{name}:{self.port}"


class MediaFetcher:
    """Fetches what URLs name. Threads may share it.

    `allowed_media_domains`: hosts by their exact names; `*` for any. `allowed_local_media_path`: the folder below which
    `file:` URLs may lead. `resolve` looks up the addresses of a host; `connect` opens a connection to an address.
    """

    def __init__(
        self,
        allowed_media_domains: Sequence[str] = (),
        allowed_local_media_path: str | None = None,
        limits: FetchLimits = FetchLimits(),
        *,
        resolve: Callable[[str, int], list[str]] | None = None,
        connect: Callable[[str, int, float], socket.socket] | None = None,
        tls: ssl.SSLContext | None = None,
    ):
        self._domains = frozenset(name if name == "*" else host_name(name) for name in allowed_media_domains)
        self._folder: Path | None = None
        if allowed_local_media_path:
            self._folder = Path(os.path.realpath(allowed_local_media_path))
            if not self._folder.is_dir():
                raise ConfigError(f"allowed_local_media_path is {shown(allowed_local_media_path)}, which is no folder.")
        self._limits = limits
        self._resolve = resolve or addresses_of
        self._connect = connect or connect_to
        self._tls = tls

    def fetch(self, url: str, field: str) -> bytes:
        """The bytes that an http, https or file URL names.

        Raises RequestError for a URL that may not be fetched, FetchError for one that could not be. Both name `field`.
        """
        scheme = url[: url.find(":")].lower()
        if scheme == "file":
            return self._read_file(url, field)
        if scheme not in ("http", "https"):
            raise RequestError(f"{field} has a URL that begins {shown(url[:12])}. Use data:, https: or http:.", field)
        if not self._domains:
            raise RequestError(
                f"{field} is a remote picture, and this server fetches none: send it as a data URL. "
                "An operator allows hosts by --allowed-media-domains.",
                field,
            )
        deadline = time.monotonic() + self._limits.seconds
        place = self._checked_place(url, field)
        for _ in range(self._limits.max_redirects + 1):
            found = self._get(place, deadline, field)
            if isinstance(found, bytes):
                return found
            url, place = self._redirected(url, place, found, field)
        raise FetchError(
            f"{field} could not be fetched: it is redirected more than {self._limits.max_redirects} times.", field
        )

    def _checked_place(self, url: str, field: str) -> Place:
        """Raises RequestError for a URL that is malformed, or of a host that is not allowed."""
        place = place_of(url)
        if place is None:
            raise RequestError(f"{field} is no valid URL with just a host, a path and a query.", field)
        if not self._allows(place):
            raise RequestError(
                f"{field} leads to the host {shown(place.host)}, which is not among --allowed-media-domains. "
                "Send the picture as a data URL.",
                field,
            )
        return place

    def _allows(self, place: Place) -> bool:
        return "*" in self._domains or place.host in self._domains

    def _redirected(self, url: str, place: Place, location: str, field: str) -> tuple[str, Place]:
        """Where a redirect leads. The error does not say it: it may be a name of the server's own network."""
        try:
            following = urljoin(url, location)
        except ValueError:
            following = ""
        then = place_of(following)
        if then is None or not self._allows(then) or (place.scheme, then.scheme) == ("https", "http"):
            raise FetchError(f"{field} could not be fetched: it is redirected to where nothing may be fetched.", field)
        return following, then

    def _get(self, place: Place, deadline: float, field: str) -> bytes | str:
        """The body, or where a redirect leads."""
        watch = Watch(deadline)
        try:
            with watch.over(self._opened(place, watch, field), self._handshake(place)) as connection:
                headers = {
                    "Host": place.host_header,
                    "User-Agent": f"jaxpaged/{__version__}",
                    "Accept": "image/*",
                    "Accept-Encoding": "identity",
                    "Connection": "close",
                }
                client = http.client.HTTPConnection(place.host, place.port)
                client.sock = connection
                client.request("GET", place.target, headers=headers)
                found = self._body(client.getresponse(), field)
            problem = None
        except FetchError as error:
            problem = error
        except ssl.SSLCertVerificationError:
            problem = FetchError(f"{field} could not be fetched: its host's certificate is not valid.", field)
        except (OSError, http.client.HTTPException, ValueError) as error:
            logger.debug("%s could not be fetched", place.host, exc_info=error)
            problem = FetchError(f"{field} could not be fetched: its server broke off, or speaks no HTTP.", field)
        if watch.is_over:  # what was read may have ended there
            raise FetchError(f"{field} could not be fetched within {self._limits.seconds:g} s.", field)
        if problem is not None:
            raise problem
        return found

    def _opened(self, place: Place, watch: "Watch", field: str) -> socket.socket:
        """A connection to the first address that answers, when all are public."""
        try:
            addresses = self._resolve(place.host, place.port)
        except (OSError, ValueError):
            addresses = []
        if not addresses or not all(map(is_public, addresses)):  # one message: names of this network stay unknown
            raise FetchError(f"{field} could not be fetched: its host has no public address.", field)
        for address in addresses:
            try:
                return self._connect(address, place.port, watch.seconds_left())
            except OSError as error:
                logger.debug("no connection to %s", place.host, exc_info=error)
        raise FetchError(f"{field} could not be fetched: its host cannot be reached.", field)

    def _handshake(self, place: Place) -> Callable[[socket.socket], socket.socket] | None:
        """What makes TLS of a connection; None for http."""
        if place.scheme == "http":
            return None
        context = self._tls or ssl.create_default_context()
        return lambda plain: context.wrap_socket(plain, server_hostname=place.host, do_handshake_on_connect=False)

    def _body(self, response: http.client.HTTPResponse, field: str) -> bytes | str:
        if response.status in REDIRECTS and response.getheader("Location"):
            return response.getheader("Location") or ""
        if response.status != 200:
            raise FetchError(f"{field} could not be fetched: its server answers {response.status}.", field)
        if response.getheader("Content-Encoding", "identity").strip().lower() != "identity":
            raise FetchError(f"{field} could not be fetched: its server sends it compressed.", field)
        most = self._limits.max_bytes
        pieces, num_bytes = [], 0
        too_large = FetchError(f"{field} could not be fetched: it has more than {most} bytes.", field)
        if response.length is not None and response.length > most:
            raise too_large
        while piece := response.read(PIECE):
            num_bytes += len(piece)
            if num_bytes > most:
                raise too_large
            pieces.append(piece)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(pieces)

    def _read_file(self, url: str, field: str) -> bytes:
        """A regular file below the allowed folder, links followed before that is asked."""
        if self._folder is None:
            raise RequestError(
                f"{field} is a file of the server, and none may be read: send it as a data URL. "
                "An operator allows a folder by --allowed-local-media-path.",
                field,
            )
        refused = RequestError(f"{field} is no file below --allowed-local-media-path.", field)
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise refused
            path = Path(os.path.realpath(unquote(parts.path, errors="strict")))
            data = read_below(self._folder, path.relative_to(self._folder), self._limits.max_bytes)
        except (OSError, ValueError):
            raise refused from None
        if len(data) > self._limits.max_bytes:
            raise RequestError(f"{field} is a file of more than {self._limits.max_bytes} bytes.", field)
        return data


class Watch:
    """Ends a connection at a deadline, however slowly its other side sends."""

    def __init__(self, deadline: float):
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def seconds_left(self) -> float:
        """At least a little: a time limit of 0 would mean something else to a socket."""
        return max(self._deadline - time.monotonic(), 0.001)

    @contextmanager
    def over(
        self, connection: socket.socket, handshake: Callable[[socket.socket], socket.socket] | None
    ) -> Iterator[socket.socket]:
        """The connection, after its handshake, until the deadline. It is closed in the end."""
        try:
            connection.settimeout(self.seconds_left())
            secured = connection = handshake(connection) if handshake else connection
            timer = threading.Timer(self.seconds_left(), self._end, [connection])
            timer.daemon = True
            timer.start()
            try:
                if isinstance(secured, ssl.SSLSocket):
                    secured.do_handshake()
                yield secured
            finally:
                timer.cancel()
                timer.join()
        finally:
            connection.close()

    def _end(self, connection: socket.socket) -> None:
        with suppress(OSError):  # the other side was quicker
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not TLS's own: another thread is inside of it


def place_of(url: str) -> Place | None:
    """The parts of an http or https URL; None when it has others, or is malformed."""
    if any(letter <= " " or letter in "\\\x7f" for letter in url):
        return None
    try:
        parts = urlsplit(url)
        host = host_name(parts.hostname or "")
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or port == 0:
        return None
    if not HOST_NAME.fullmatch(host) and not (":" in host and is_address(host)):
        return None
    target = quote(parts.path or "/", safe=string.punctuation)
    if parts.query:
        target += "?" + quote(parts.query, safe=string.punctuation)
    return Place(parts.scheme, host, port or default_port(parts.scheme), target)


def default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def host_name(name: str) -> str:
    """As names are compared: small letters of ASCII, without a dot at the end. ValueError for what is no name."""
    lower = name.lower().removesuffix(".")
    return lower if lower.isascii() else lower.encode("idna").decode("ascii")


def addresses_of(host: str, port: int) -> list[str]:
    """All addresses of a host, by the system's resolver. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def connect_to(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_public(text: str) -> bool:
    """Whether an address is of the public Internet, and is not another address in disguise.

    Of IPv6 only 2000::/3 is: NAT64, IPv4 in IPv6, link-local and site-local addresses all lie outside.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if address.version == 6 and int(address) >> 125 != 1:
        return False
    if any(address.version == network.version and address in network for network in TRANSLATED):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def read_below(folder: Path, path: Path, max_bytes: int) -> bytes:
    """At most `max_bytes` + 1 bytes of a regular file. OSError when a part of its path is a link, or it is no file.

    The path is walked from folder to folder, so that no link put there meanwhile leads out.
    """
    *folders, name = path.parts or ("",)
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for each in folders:
            inner = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError("no regular file")
        return opened.read(max_bytes + 1)
