"""Requests to an ASGI application without a socket, with the client's behaviour at hand: slow, or gone."""

import asyncio
import json
from dataclasses import dataclass, field

from jaxpaged.entrypoints.http.transport.sending import PIPE


@dataclass
class Answer:
    """What the application sent."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)

    @property
    def body(self):
        return b"".join(self.pieces)

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """The data of all server-sent events; JSON is decoded, `[DONE]` stays text."""
        frames = [frame for frame in self.body.decode().split("\n\n") if frame and not frame.startswith(":")]
        assert all(frame.startswith("data: ") for frame in frames), frames
        data = [frame.removeprefix("data: ") for frame in frames]
        return [each if each == "[DONE]" else json.loads(each) for each in data]


class Pipe:
    """The pipe to a client that has begun to get an answer; clear while `is_reading` says so."""

    def __init__(self, answer, is_reading, take):
        self._answer = answer
        self._is_reading = is_reading
        self._take = take
        self.num_bytes = self.num_pieces = 0
        self.last_time = 0.0

    @property
    def is_clear(self):
        return bool(self._answer.pieces) and self._is_reading()

    def write(self, piece):
        assert piece
        self._take(piece)
        self.num_bytes += len(piece)
        self.num_pieces += 1
        self.last_time = asyncio.get_running_loop().time()


class Client:
    """Asks an application. `headers` go with every request. `is_reading`: answers have a pipe, which is clear while
    this function says so."""

    def __init__(self, app, headers=None, is_reading=None):
        self.app = app
        self.headers = headers or {}
        self.is_reading = is_reading
        self.pipe = None  # of the last answer

    async def get(self, path, **headers):
        return await self.ask("GET", path, b"", headers)

    async def post(self, path, body=None, leave_after=None, **headers):
        """`body` is JSON, or bytes as they are. The client goes away after `leave_after` pieces of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content_type": "application/json", **headers}
        return await self.ask("POST", path, data, headers, leave_after)

    async def ask(self, method, path, data, headers, leave_after=None):
        """`headers` with underscores for dashes."""
        answer, left = Answer(), asyncio.Event()
        if leave_after == 0:
            asyncio.get_running_loop().call_later(0.02, left.set)
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        def take(piece):
            answer.pieces.append(piece)
            if leave_after and len(answer.pieces) >= leave_after:
                left.set()

        async def send(message):
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message["body"]:
                take(message["body"])
                if left.is_set():
                    await asyncio.sleep(0)

        scope = scope_of(method, path, {**self.headers, **headers})
        if self.is_reading is not None:
            scope[PIPE] = self.pipe = Pipe(answer, self.is_reading, take)
        await self.app(scope, receive, send)
        return answer


def scope_of(method, path, headers):
    path, _, query = path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
