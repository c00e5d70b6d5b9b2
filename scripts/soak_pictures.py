"""Clients with pictures, for `soak.py --pictures`: over every interface, large, small and wrong, and some who leave.

The pictures are drawn, and the model was trained on such. What it says of each when nobody else asks is known before
the run begins; a client that is told anything else was given another picture's answer, or a broken one. There are more
pictures than any cache of that server holds, so that they are encoded, found, and encoded again.
"""

import asyncio
import base64
import io
import json
import random
import socket
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from demo_model.pictures import one_shape
from PIL import Image
from soak_clients import (
    CHAT,
    CODES,
    RESET,
    Client,
    Refused,
    Sort,
    aborted,
    ask,
    connected,
    events,
    head_of,
    request_bytes,
    sort,
)

from jaxpaged.client.messages import generate_request
from jaxpaged.proto import jaxpaged_pb2 as pb

QUESTION = "What is in the picture?"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
NUM_PICTURES, NUM_LARGE = 120, 4
LARGE = (4000, 3000)
FORMATS = ("png", "jpeg", "webp", "gif")
MOST_TOKENS = 24
LONG = {CHAT: {"max_tokens": 100, "ignore_eos": True}, MESSAGES: {"max_tokens": 100}}
REFUSED = ("400", "422")
MODEL = "any"
ENGINE = [
    "--num-gpu-blocks-override",
    "60",
    "--limit-mm-per-prompt",
    '{"image": 3}',
    "--encoder-cache-size",
    "180",
    "--mm-bytes-in-flight-gb",
    "0.3",
    "--mm-processor-cache-gb",
    "0.002",
]
"""Few KV blocks, room for five pictures on the device, for some seventy processed ones, and for eight large ones under
way."""


@dataclass(frozen=True)
class Picture:
    """A file. `words` is what the model says of it, once it was asked."""

    file: bytes
    kind: str
    words: str = ""

    @cached_property
    def base64(self) -> str:
        return base64.b64encode(self.file).decode()

    @property
    def media_type(self) -> str:
        return f"image/{self.kind}"

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.base64}"


def drawn(seed: int, count: int = NUM_PICTURES, num_large: int = NUM_LARGE) -> list[Picture]:
    """Pictures of one shape each, the last ones of 12 megapixels."""
    draw = random.Random(seed)
    pictures = []
    for number in range(count):
        image = Image.fromarray(one_shape(draw).pixels)
        is_large = number >= count - num_large
        kind = "jpeg" if is_large else draw.choice(FORMATS)
        stream = io.BytesIO()
        (image.resize(LARGE, Image.Resampling.BICUBIC) if is_large else image).save(stream, kind, quality=92)
        pictures.append(Picture(stream.getvalue(), kind))
    return pictures


async def known(port: int, pictures: Sequence[Picture]) -> list[Picture]:
    """The same pictures with what the model says of each, one after the other."""
    told = []
    for each in pictures:
        answer = await ask(port, CHAT, chat_body([each]))
        told.append(replace(each, words=chat_text(answer)))
    return told


# ---- bodies, and where answers have their text


def chat_body(pictures: Sequence[Picture], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": each.url}} for each in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return {"messages": messages, "max_tokens": MOST_TOKENS, "temperature": 0, **fields}


def chat_text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def messages_body(pictures: Sequence[Picture], **fields: Any) -> dict[str, Any]:
    sources = [{"type": "base64", "media_type": each.media_type, "data": each.base64} for each in pictures]
    content = [*({"type": "image", "source": each} for each in sources), {"type": "text", "text": QUESTION}]
    turns = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": turns, "max_tokens": MOST_TOKENS, "temperature": 0, **fields}


def responses_body(pictures: Sequence[Picture], **fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_image", "image_url": each.url} for each in pictures]
    asked = [{"role": "user", "content": [*parts, {"type": "input_text", "text": QUESTION}]}]
    return {"input": asked, "max_output_tokens": MOST_TOKENS, "temperature": 0, **fields}


FORMS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    CHAT: (chat_body, chat_text),
    MESSAGES: (messages_body, lambda answer: answer["content"][0]["text"]),
    RESPONSES: (responses_body, lambda answer: answer["output"][0]["content"][0]["text"]),
}


async def message_events(reader: Any) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream of Anthropic's. Raises Refused for an error, and ValueError when there is no end."""
    await head_of(reader)
    async for line in reader:
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if event["type"] == "error":
                raise Refused("503" if event["error"]["type"] == "overloaded_error" else event["error"]["type"])
            yield event
            if event["type"] == "message_stop":
                return
    raise ValueError("the stream has no end")


def piece_of(event: dict[str, Any]) -> str:
    """The text that an event of either API's stream brings."""
    if "choices" in event:
        return "".join(each["delta"].get("content") or "" for each in event["choices"])
    return event.get("delta", {}).get("text") or ""


@dataclass(frozen=True)
class PictureClients:
    """What clients do with these pictures."""

    pictures: Sequence[Picture]

    def one(self, client: Client, large: bool = False) -> Picture:
        return client.draw.choice(self.pictures[-NUM_LARGE:] if large else self.pictures[:-NUM_LARGE])

    async def asks(self, client: Client, path: str, large: bool = False) -> str:
        picture, (body_of, text_of) = self.one(client, large), FORMS[path]
        answer = await ask(client.places.port, path, body_of([picture]))
        return judged(picture, text_of(answer))

    async def streams(self, client: Client, path: str) -> str:
        picture, text = self.one(client), ""
        body = FORMS[path][0]([picture], stream=True)
        async with connected(client.places.port) as (reader, writer):
            writer.write(request_bytes(path, json.dumps(body).encode()))
            async for event in (events if path == CHAT else message_events)(reader):
                text += piece_of(event)
        return judged(picture, text)

    async def several(self, client: Client) -> str:
        """Two or three at once, one perhaps twice: what is said of them is not known."""
        shown = [self.one(client) for _ in range(client.draw.choice((2, 2, 3)))]
        answer = await ask(client.places.port, CHAT, chat_body(shown))
        return "200" if answer["usage"]["prompt_tokens"] > 36 * len(shown) else "torn"

    async def leaves_upload(self, client: Client) -> str:
        """Sends a part of the body, and goes: politely, or with a reset."""
        picture = self.one(client, large=client.draw.random() < 0.3)
        path = client.draw.choice(list(FORMS))
        data = request_bytes(path, json.dumps(FORMS[path][0]([picture])).encode())
        async with connected(client.places.port) as (_, writer):
            writer.write(data[: client.draw.randrange(len(data))])
            await writer.drain()
            may_reset(client, writer)
        return "left"

    async def leaves(self, client: Client) -> str:
        """Sends it all, and goes: while it is decoded, queued, encoded, or answered."""
        picture = self.one(client, large=client.draw.random() < 0.2)
        path, streams = client.draw.choice([CHAT, MESSAGES]), client.draw.random() < 0.7
        body = FORMS[path][0]([picture], stream=streams, **LONG[path])
        async with connected(client.places.port) as (reader, writer):
            writer.write(request_bytes(path, json.dumps(body).encode()))
            await writer.drain()
            may_reset(client, writer)
            left = client.draw.randint(0, 5)
            if not streams or not left:
                await moment(client)
                return "left"
            async for _ in (events if path == CHAT else message_events)(reader):
                left -= 1
                if not left:
                    return "left"
        return "200"

    async def aborts(self, client: Client) -> str:
        return await aborted(client, CHAT, chat_body([self.one(client)], stream=True, **LONG[CHAT]))

    async def wrong(self, client: Client) -> str:
        """Files that are none, or not whole, or too many, or elsewhere, or called by a name that nobody gave."""
        picture, path = self.one(client), client.draw.choice(list(FORMS))
        file = bytearray(picture.file)
        file[client.draw.randrange(8, len(file))] ^= 255
        bad = client.draw.choice(
            [
                [replace(picture, file=bytes(file[: client.draw.randrange(1, len(file))]))],
                [replace(picture, file=client.draw.randbytes(300))],
                [replace(picture, file=b"")],
                [replace(picture, file=bomb())],
                [picture] * 5,
                [picture, replace(picture, file=picture.file[:100])],
            ]
        )
        await ask(client.places.port, path, FORMS[path][0](bad))
        return "200"

    async def wrong_url(self, client: Client) -> str:
        """An address from which nothing is fetched, or no address."""
        urls = ["http://127.0.0.1:1/a.png", "file:///etc/passwd", "data:image/png;base64,!!", "data:,", "cat.jpg", ""]
        part = {"type": "image_url", "image_url": {"url": client.draw.choice(urls)}}
        await ask(client.places.port, CHAT, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 3})
        return "200"

    async def names(self, client: Client) -> str:
        """A picture under a name, and then only the name, which the server may have forgotten."""
        picture = self.one(client)
        body, name = chat_body([picture]), f"picture {self.pictures.index(picture)}"
        [part, _] = body["messages"][0]["content"]
        part["uuid"] = name
        first = judged(picture, chat_text(await ask(client.places.port, CHAT, body)))
        part["image_url"] = None
        return first if first != "right" else judged(picture, chat_text(await ask(client.places.port, CHAT, body)))

    # ---- gRPC

    async def grpc_asks(self, client: Client) -> str:
        picture, text = self.one(client, large=client.draw.random() < 0.05), ""
        async for response in client.stub().Generate(grpc_request([picture])):
            text += "".join(each.text for each in response.sequences)
        return judged(picture, text)

    async def grpc_many(self, client: Client) -> str:
        """Four pictures on one stream, one of which is aborted."""
        shown = {str(number): self.one(client) for number in range(4)}
        requests = [grpc_request([picture], request_id=name) for name, picture in shown.items()]
        given = [pb.GenerateStreamRequest(generate=each) for each in requests]
        aborted, texts, ended = client.draw.choice(list(shown)), dict.fromkeys(shown, ""), set()
        call = client.stub().GenerateStream(iter([*given, pb.GenerateStreamRequest(abort=aborted)]))
        async for message in call:
            for event in message.events:
                if event.HasField("error"):
                    raise Refused(CODES.get(event.error.code, f"code {event.error.code}"))
                texts[event.request_id] += "".join(each.text for each in event.response.sequences)
                if event.HasField("done"):
                    ended.add(event.request_id)
        words = {judged(shown[name], texts[name]) for name in shown if name != aborted}
        return "torn" if ended != set(shown) else "wrong" if "wrong" in words else "right"

    async def grpc_cancels(self, client: Client) -> str:
        large = client.draw.random() < 0.2
        request = grpc_request([self.one(client, large)], max_tokens=100, ignore_eos=True)
        call, left = client.stub().Generate(request), client.draw.randint(0, 3)
        if not left:
            await moment(client)
        for _ in range(left):
            if not await call.read():
                return "OK"
        call.cancel()
        return "left"

    async def grpc_wrong(self, client: Client) -> str:
        image = client.draw.choice(
            [client.draw.randbytes(200), b"", "http://127.0.0.1/a.png", self.one(client).file[:80]]
        )
        content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
        async for _ in client.stub().Generate(generate_request([{"role": "user", "content": content}], {})):
            pass
        return "OK"

    def sorts(self) -> dict[str, Sort]:
        """All kinds of clients, by the words of the table."""
        said = ("right", "wrong")
        return {
            "chat": sort(partial(self.asks, path=CHAT), 10, *said),
            "chat, streamed": sort(partial(self.streams, path=CHAT), 10, *said),
            "messages": sort(partial(self.asks, path=MESSAGES), 6, *said),
            "messages, streamed": sort(partial(self.streams, path=MESSAGES), 6, *said),
            "responses": sort(partial(self.asks, path=RESPONSES), 6, *said),
            "12 megapixels": sort(partial(self.asks, path=CHAT, large=True), 4, *said),
            "several pictures": sort(self.several, 6, "200"),
            "a name for it": sort(self.names, 4, *said, "400"),
            "leaves while it uploads": sort(self.leaves_upload, 8, "left"),
            "leaves later": sort(self.leaves, 14, "left", "200"),
            "aborts": sort(self.aborts, 6, "aborted", "200"),
            "wrong pictures": sort(self.wrong, 6, *REFUSED),
            "wrong addresses": sort(self.wrong_url, 3, *REFUSED),
            "gRPC picture": sort(self.grpc_asks, 10, *said),
            "gRPC four on a stream": sort(self.grpc_many, 3, *said),
            "gRPC cancels picture": sort(self.grpc_cancels, 8, "left", "OK"),
            "gRPC wrong picture": sort(self.grpc_wrong, 3, "INVALID_ARGUMENT"),
        }


def judged(picture: Picture, text: str) -> str:
    return "right" if text == picture.words else "wrong"


def bomb() -> bytes:
    """A few bytes that claim to be a picture of 30,000 x 30,000."""
    stream = io.BytesIO()
    Image.new("1", (8, 8)).save(stream, "png")
    file = bytearray(stream.getvalue())
    file[16:24] = (30_000).to_bytes(4, "big") * 2
    file[29:33] = zlib.crc32(file[12:29]).to_bytes(4, "big")
    return bytes(file)


def grpc_request(pictures: Sequence[Picture], **values: Any) -> pb.GenerateRequest:
    parts = [{"type": "image", "image": each.file} for each in pictures]
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return generate_request(chat, {"max_tokens": MOST_TOKENS, "temperature": 0, **values})


async def moment(client: Client) -> None:
    await asyncio.sleep(client.draw.random() / 4)


def may_reset(client: Client, writer: Any) -> None:
    """Half of the time closing is a reset from now on."""
    if client.draw.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
