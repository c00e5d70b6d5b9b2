"""Attacks a server of its own, on this machine only, and tells what it did to the others.

    python scripts/attack_server.py [--model demo] [--quick] [--only NAME ...] [engine options]

Starts `jaxpaged serve` on a free port of 127.0.0.1 with default options and no key, and runs one attack after the other
against it: bodies that are long, hard to tokenise, to check, to compute or to answer, and bytes that are no request.
The first "attack" is none: what its line says, the machine itself costs. While an attack runs, one client asks for
`/health` all the time, and another, with an address of its own (127.0.0.2), for a short chat. No other address is ever
asked. Every attack has a fixed number of requests, every request ends after `SECONDS`, and then the server is stopped.

`--quick` shows that the attacks run: a tenth of each, against a server with few programs that compiles them meanwhile.

The table has a line per attack: the longest wait for `/health` and for the normal client in ms, the memory of the
server's process in MiB before and after, and what the attacker got ("late": nothing in time). The exit status is 1 when
anybody got a 5xx that is not a refusal for want of room, when one of the other two got no 200, when `/health` took
longer than 100 ms, the normal client longer than 1 s, or when at the end memory is more than `MEMORY_MARGIN` over what
it was before the first attack (a small round of all attacks comes before, so that what is made once is there). The
times mean something on a quiet machine only: `--no-times` prints and does not judge them.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from server_process import LOOPBACK, READY_SECONDS, memory, serve_command, server

OTHER_CLIENT = "127.0.0.2"
SECONDS, LEAST_SECONDS = 60.0, 2.0
"""A request ends after the former; an attack is watched for the latter at least."""
QUICK_SCALE = 0.1
QUICK_OPTIONS = [
    "--ready-when",
    "serving",
    "--max-num-seqs",
    "4",
    "--max-model-len",
    "512",
    "--max-num-batched-tokens",
    "64",
]  # few programs are compiled meanwhile
PAUSE = 0.02
"""Seconds between two questions of the clients that are not attackers."""
PIECE = 2**17
"""Bytes that are handed over at a time."""
HEALTH_SECONDS, NORMAL_SECONDS = 0.1, 1.0
MEMORY_MARGIN = 128
"""MiB."""
WORDS = "the cat sat on the mat and "
USER = {"role": "user", "content": "What is 27 + 45?"}
NORMAL = {"messages": [USER], "max_tokens": 4, "temperature": 0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Request = tuple[str, bytes]
"""Path and body; an empty path: the bytes are sent as they are."""


def post(path: str, **body: object) -> Request:
    return path, json.dumps(body).encode()


def patterns(count: int, number: int) -> dict:
    """A schema that is hard to compile: any two of its patterns may match the same name."""
    return {"type": "object", "patternProperties": {f"^a{i}.*{number}x{i}$": {"type": "string"} for i in range(count)}}


def shaped(**shape: object) -> Request:
    return post(COMPLETIONS, prompt="a", max_tokens=4, structured_outputs=shape)


def long_texts(scale: float) -> list[Request]:
    text = WORDS * int(550_000 * scale)
    return [
        post(COMPLETIONS, prompt=text, max_tokens=1, truncate_prompt_tokens=10),
        post(COMPLETIONS, prompt=text[: len(text) // 15], max_tokens=1, truncate_prompt_tokens=-1),
        post(COMPLETIONS, prompt="a" * len(text), max_tokens=1, truncate_prompt_tokens=10),
        post(COMPLETIONS, prompt=text),
        post(CHAT, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=10, max_tokens=1),
        post("/tokenize", prompt=text),
    ]


def grammars(scale: float) -> list[Request]:
    return [shaped(json=patterns(max(int(300 * scale), 30), number)) for number in range(8)] * 2


def many_sequences(scale: float) -> list[Request]:
    n = max(int(2048 * scale), 2)
    return [
        post(COMPLETIONS, prompt="a", max_tokens=1, n=16_384),
        post(COMPLETIONS, prompt="a", max_tokens=1, n=n),
        post(COMPLETIONS, prompt=["a"] * 1024, max_tokens=1, n=16),
        post(COMPLETIONS, prompt=["a"] * (n // 2), max_tokens=1),
    ]


def many_values(scale: float) -> list[Request]:
    count = int(200_000 * scale)
    return [
        post(CHAT, messages=[USER] * count, max_tokens=1),
        post(COMPLETIONS, prompt="a", max_tokens=1, vllm_xargs={f"k{i}": i for i in range(count // 2)}),
        post(COMPLETIONS, prompt="a", max_tokens=1, allowed_token_ids=[7] * count),
        post(COMPLETIONS, prompt=[7] * count, max_tokens=1, truncate_prompt_tokens=4),
        post(CHAT, messages=[USER], documents=[{}] * count, max_tokens=1),
        (CHAT, b'{"messages":[' + b"{}," * (20 * count) + b"{}]}"),
    ]


def big_answers(scale: float) -> list[Request]:
    ids = [7 + i % 1000 for i in range(int(3900 * scale))]
    return [post(COMPLETIONS, prompt=ids, max_tokens=1, prompt_logprobs=20) for _ in range(6)]


def nonsense(scale: float) -> list[Request]:
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    hosts = (b"", b"Host: a\r\nHost: b\r\n", b"Host: a b\r\n")
    ids = (b"two words", b"\xff", b"")
    return [
        (COMPLETIONS, b'{"prompt": "\xff\xfe"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'),
        shaped(grammar='start: "a"{1000000000}'),
        shaped(regex="(" * 1000),
        *(("", head % (host, len(body), body)) for host in hosts),
        *(("", head % (b"Host: a\r\nX-Request-Id: " + each + b"\r\n", len(body), body)) for each in ids),
        ("", b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * int(200_000 * scale) + b"\r\n\r\n"),
        ("", b"\x16\x03\x01 hello\r\n\r\n"),
        (COMPLETIONS, b"[" * int(1_000_000 * scale)),
    ]


ATTACKS: dict[str, Callable[[float], list[Request]]] = {
    "none": lambda scale: [],
    "long texts": long_texts,
    "hard grammars": grammars,
    "many sequences": many_sequences,
    "many values": many_values,
    "big answers": big_answers,
    "nonsense": nonsense,
}


@dataclass
class Row:
    """What one attack did. Times are the longest, in seconds; memory is in MiB."""

    name: str
    statuses: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)  # what the clients got that do not attack
    health: float = 0.0
    normal: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def write(self) -> str:
        got = " ".join(f"{status}:{count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.name:<16}{self.health * 1000:>10.0f}{self.normal * 1000:>10.0f}"
            f"{self.before:>9.0f}{self.after:>9.0f}  {got}"
        )


HEADING = f"{'attack':<16}{'health ms':>10}{'normal ms':>10}{'MiB':>9}{'after':>9}  what the attacker got"


async def ask(port: int, request: Request, source: str = LOOPBACK, method: bytes = b"POST") -> str:
    """The status of one request; "closed" when the server ends it without one, "late" when it takes `SECONDS`."""
    try:
        async with asyncio.timeout(SECONDS):
            return await status_of(port, request, source, method)
    except TimeoutError:
        return "late"
    except ConnectionError:
        return "closed"


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """In pieces, with turns for the others between them: the clients share this process, and one that hands over 15 MB
    at once would measure its own waiting (80 to 170 ms were seen). A server that has answered may read no further."""
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), PIECE):
            writer.write(data[start : start + PIECE])
            await writer.drain()
            await asyncio.sleep(0)


async def status_of(port: int, request: Request, source: str, method: bytes) -> str:
    """`ask` on a connection of its own, without a limit of time."""
    path, body = request
    reader, writer = await asyncio.open_connection(LOOPBACK, port, local_addr=(source, 0))
    try:
        head = b"%b %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        host = f"{LOOPBACK}:{port}".encode()
        head = head % (method, path.encode(), host, len(body)) + b"Connection: close\r\n\r\n"
        if path:
            writer.write(head)
        await send(writer, body)
        line = await reader.readline()
        if path:
            while await reader.read(2**20):
                pass
        return line.split()[1].decode() if line else "closed"
    finally:
        writer.close()


async def attack(port: int, pid: int, name: str, scale: float) -> Row:
    """Run one attack, all of its requests at a time, with the others' questions meanwhile and once afterwards."""
    row, over = Row(name, before=memory(pid)), asyncio.Event()

    async def question(longest: str, request: Request, source: str, method: bytes) -> None:
        while True:
            ended, start = over.is_set(), time.monotonic()
            row.others[await ask(port, request, source, method)] += 1
            setattr(row, longest, max(getattr(row, longest), time.monotonic() - start))
            if ended:
                return
            await asyncio.sleep(PAUSE)

    async def one(request: Request) -> None:
        row.statuses[await ask(port, request)] += 1

    requests = ATTACKS[name](scale)
    others = [
        asyncio.ensure_future(question("health", ("/health", b""), LOOPBACK, b"GET")),
        asyncio.ensure_future(question("normal", post(CHAT, **NORMAL), OTHER_CLIENT, b"POST")),
    ]
    await asyncio.gather(asyncio.sleep(LEAST_SECONDS), *map(one, requests))
    over.set()
    await asyncio.gather(*others)
    row.after = memory(pid)
    return row


async def ready(port: int) -> None:
    """Wait until the server says that it is ready, and a chat is answered."""
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end:
        if await ask(port, ("/ready", b""), method=b"GET") == "200" and await ask(port, post(CHAT, **NORMAL)) == "200":
            return
        await asyncio.sleep(0.2)
    sys.exit("the server was not ready in time")


def problems(rows: list[Row], first_memory: float, judge_times: bool) -> list[str]:
    """What must not be."""
    found: list[str] = []
    for row in rows:
        bad = {status for status in [*row.statuses, *row.others] if status.startswith("5") and status != "503"}
        found += [f"{row.name}: a request got {status}" for status in sorted(bad)]
        found += [f"{row.name}: others got {status}" for status in row.others if status != "200"]
        if judge_times and row.health > HEALTH_SECONDS:
            found.append(f"{row.name}: /health took {row.health * 1000:.0f} ms")
        if judge_times and row.normal > NORMAL_SECONDS:
            found.append(f"{row.name}: a normal client waited {row.normal * 1000:.0f} ms")
    if rows and rows[-1].after > first_memory + MEMORY_MARGIN:
        found.append(f"memory is {rows[-1].after:.0f} MiB at the end; it was {first_memory:.0f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quick", action="store_true", help="a tenth of every attack")
    parser.add_argument("--no-times", action="store_true", help="do not judge times")
    parser.add_argument("--only", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    arguments, options = parser.parse_known_args()
    scale, rows = QUICK_SCALE if arguments.quick else 1.0, []
    few = QUICK_OPTIONS if arguments.quick else []
    with server(serve_command(arguments.model, *few, *options)) as started:
        port, pid = started.port, started.pid
        asyncio.run(ready(port))
        for name in arguments.only:
            asyncio.run(attack(port, pid, name, scale / 10))
        first_memory = memory(pid)
        print(HEADING, flush=True)
        for name in arguments.only:
            rows.append(asyncio.run(attack(port, pid, name, scale)))
            print(rows[-1].write(), flush=True)
    found = problems(rows, first_memory, not arguments.no_times)
    print("\n".join(found) or "nothing that must not be")
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server is stopped then too
    sys.exit(main())
