"""The sockets between the processes of one engine: one drives, the others follow.

Commands go to all followers alike, in order; reports come back from each. Both ends prove that they know the group's
secret, and everything is encrypted (CurveZMQ). A stranger is never heard, wherever the sockets listen. This
module carries frames and knows nothing of what they say.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

MAX_MESSAGE_BYTES = 256 << 20
SILENCE_SECONDS = 15.0
"""A process that gives no sign of life for so long counts as lost: it was stopped, or its host is gone."""

OPEN_SECONDS = 5.0
"""How much later than its first word the socket of a process may be open on which it listens."""
LINGER_SECONDS = 2.0
"""How long a process that ends waits until its last report has left."""
CLOSE_SECONDS = 10.0
"""After which a process stops waiting for sockets of its own to be closed."""


class LostError(Exception):
    """There is no connection to follower `rank`."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} is not connected")
        self.rank = rank


class Keys:
    """The two pairs of keys that follow from a group's secret: only who knows it has them."""

    def __init__(self, secret: bytes):
        self.driver, self.follower = (key_pair(secret, role) for role in (b"driver", b"follower"))


def key_pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """(public, secret) in zmq's letters."""
    private = z85.encode(hashlib.blake2b(secret, person=role, digest_size=32).digest())
    return zmq.curve_public(private), private


class OnlyFollowers:
    """Lets in who has the followers' key."""

    def __init__(self, keys: Keys):
        self._public = keys.follower[0]

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class DriverEnd:
    """Where followers connect to: two ports of `host`, from `port` on, or whichever are free.

    `send` is for one thread at a time, `receive` for another one. Raises zmq.ZMQError when an address is taken.
    """

    def __init__(self, host: str, port: int | None, secret: bytes):
        keys = Keys(secret)
        self._context = zmq.Context()
        self._met: set[int] = set()  # ranks that were sent something
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=OnlyFollowers(keys))
        self._commands, self._reports = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        self._commands.set(zmq.ROUTER_MANDATORY, 1)  # sending to somebody who is not there is an error
        try:
            self.ports = [bind(each, host, port and port + i, keys) for i, each in enumerate(self._sockets)]
        except BaseException:
            self.close()
            raise

    @property
    def _sockets(self) -> tuple[zmq.Socket, zmq.Socket]:
        return self._commands, self._reports

    def send(self, ranks: Iterable[int], frames: Sequence[bytes], patience: float = OPEN_SECONDS) -> None:
        """Send the same to followers, which have arrived. Raises LostError when one has left; of one that was never
        sent anything that is known after `patience` seconds.

        The bytes are copied once, and not for every follower; `send_multipart` would take twice as long, and four
        times for 10 KB.
        """
        send, (*firsts, last) = self._commands.send, (zmq.Frame(each, copy=True) for each in frames)
        for rank in ranks:
            self._address(rank, patience)
            for frame in firsts:
                send(frame, zmq.SNDMORE, copy=False)
            send(last, copy=False)

    def _address(self, rank: int, patience: float) -> None:
        """Begin a message. What a process says first may come before the socket is open where it listens."""
        deadline = time.monotonic() + (0.0 if rank in self._met else patience)
        while True:
            try:
                self._commands.send(name_of(rank), zmq.SNDMORE)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                if time.monotonic() > deadline:
                    raise LostError(rank) from error
                time.sleep(OPEN_SECONDS / 1000)
            else:
                self._met.add(rank)
                return

    def receive(self, seconds: float) -> list[bytes] | None:
        """The next report, if one comes in time."""
        return self._reports.recv_multipart() if self._reports.poll(round(seconds * 1e3)) else None

    def close(self, linger: float = 0.0) -> None:
        """Give up the sockets, after what was sent has left, if that takes no longer than `linger` seconds."""
        for each in self._sockets:
            each.close(linger=round(linger * 1e3))
        in_bounded_time(self._guard.stop, self._context.term)


class FollowerEnd:
    """The sockets of follower `rank`, which need not be answered yet. `receive` is for one thread, `send` for any."""

    def __init__(self, rank: int, addresses: Sequence[str], secret: bytes):
        keys = Keys(secret)
        self._context = zmq.Context()
        self._commands, self._reports = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        self._commands.set(zmq.IDENTITY, name_of(rank))
        self._sending = threading.Lock()
        self._arrived = self._watched = False
        for each in (self._commands, self._reports):
            each.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            each.set(zmq.LINGER, round(LINGER_SECONDS * 1e3))
            each.set(zmq.SNDHWM, 0)  # who waits for the driver for long says often that it lives, and must not block
            each.set(zmq.HEARTBEAT_IVL, 2000)
            each.set(zmq.HEARTBEAT_TIMEOUT, round(SILENCE_SECONDS * 1e3))
            each.curve_serverkey = keys.driver[0]
            each.curve_publickey, each.curve_secretkey = keys.follower
        self._events = self._commands.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        for each, address in zip((self._commands, self._reports), addresses, strict=True):
            each.connect(address)

    def send(self, frames: Sequence[bytes]) -> None:
        with self._sending:
            self._reports.send_multipart(frames)

    def receive(self, seconds: float) -> list[bytes] | None:
        """The next command, if one comes in time."""
        return self._commands.recv_multipart() if self._commands.poll(round(seconds * 1e3)) else None

    def wait_until_lost(self) -> None:
        """Return when the driver was there and is gone, never after `close`. For a thread of its own."""
        self._watched = True
        try:
            self._see_it_leave()
        except zmq.ContextTerminated:
            self._events.close()
            threading.Event().wait()
        self._events.close()  # `close` waits for that

    def _see_it_leave(self) -> None:
        while True:
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._arrived = True
            elif event == zmq.EVENT_DISCONNECTED and self._arrived:
                return

    def close(self) -> None:
        """Give up the sockets, after what was sent has left, if that takes no longer than `LINGER_SECONDS`."""
        self._commands.close(linger=0)
        self._reports.close()
        if not self._watched:
            self._events.close()
        in_bounded_time(self._context.term)


def in_bounded_time(*calls: Callable[[], object]) -> None:
    """Make calls that end a context. They wait for every socket of it, and leave a thread behind where one stays open,
    such as that of a thread that broke down."""

    def make_all() -> None:
        for call in calls:
            call()

    thread = threading.Thread(target=make_all, name="end of sockets", daemon=True)
    thread.start()
    thread.join(CLOSE_SECONDS)


def bind(socket: zmq.Socket, host: str, port: int | None, keys: Keys) -> int:
    """Make a socket listen, on a free port unless one is given; returns the port."""
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, ":" in host)
    socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.driver
    address = f"tcp://{bracketed(host)}"
    if port is None:
        return socket.bind_to_random_port(address)
    socket.bind(f"{address}:{port}")
    return port


def bracketed(host: str) -> str:
    """An address as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def name_of(rank: int) -> bytes:
    return b"rank %d" % rank
