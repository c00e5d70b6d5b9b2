"""Bytes that no client of good will sends: whatever a body holds, the answer is no 500, and says what is wrong."""

import asyncio
import itertools
import json
import random
from typing import ClassVar

import pytest

from jaxpaged.core.output import fault_of
from jaxpaged.entrypoints.http import body as bodies_read
from jaxpaged.entrypoints.http.app import create_app, public_endpoints
from jaxpaged.entrypoints.http.body import read_body, read_struct
from jaxpaged.entrypoints.http.errors import status_of
from jaxpaged.entrypoints.http.openai.protocol import CompletionRequest
from jaxpaged.serving.errors import ServingError
from tests.engine.fake_pooling import CLASSES, EMBEDS, FakePoolingExecutor
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service

MESSAGES = [{"role": "user", "content": "the cat ü"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2, "stop": ["dog"], "logit_bias": {"7": 1}}
TOOL = {"name": "f", "description": "ü", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
TEXTS = {"input": ["the cat ü", "sat"], "truncate_prompt_tokens": 5, "cache_salt": "a"}
BODIES = {
    "/v1/completions": {"prompt": ["the cat ü", "a"], "max_tokens": 2, "n": 2, "logprobs": 1, "vllm_xargs": {"a": [1]}},
    "/v1/chat/completions": {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"},
    "/v1/chat/completions/batch": {**CHAT, "messages": [MESSAGES, MESSAGES]},
    "/inference/v1/generate": {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 2, "stop": ["ü"], "n": 2}},
    "/invocations": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages": {"max_tokens": 2, "messages": MESSAGES, "system": "ü", "stop_sequences": ["dog"], "metadata": {}},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": [{"type": "text", "text": "ü"}]},
    "/v1/responses": {"input": [{"role": "user", "content": "the cat ü"}], "max_output_tokens": 2, "store": False},
    "/tokenize": {"prompt": "the cat ü", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [7, 8, 9]},
    "/abort_requests": {"request_ids": ["ü"]},
    "/v1/embeddings": TEXTS,
    "/pooling": TEXTS,
    "/classify": TEXTS,
    "/score": {"text_1": "the cat ü", "text_2": ["a", "sat"]},
    "/rerank": {"query": "the cat ü", "documents": ["a", {"text": "sat"}], "top_n": 1},
    "/v1/images/inspect": {"images": ["data:image/png;base64,ü"]},
}
POOLING = ("/score", "/rerank", "/v1/embeddings", "/pooling")
ALIASES = {"/v1/score": "/score", "/v1/rerank": "/rerank", "/v2/rerank": "/rerank"}
NASTY = (
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\x00",
    b"\\ud800",
    b"\\u0000",
    b"\xef\xbb\xbf",
    b"1e999",
    b"-0",
    b"99999999999999999999",
    b"[",
    b"{",
    b'"',
    b"\\",
    b"null",
    b"NaN",
    b"\n",
)


def mutated(draw, body):
    """The body with one to three places overwritten, cut, doubled, or with something nasty put in."""
    for _ in range(draw.randint(1, 3)):
        at, end = sorted(draw.randrange(len(body) + 1) for _ in range(2))
        end = min(end, at + 6)
        change = draw.choice(["nasty", "byte", "cut", "double"])
        nasty, byte = draw.choice(NASTY), draw.randbytes(1)
        middle = {"nasty": nasty, "byte": byte, "cut": b"", "double": body[at:end] * 2}[change]
        body = body[:at] + middle + body[at if change == "nasty" else end :]
    return body


@pytest.fixture(scope="module")
def asked():
    """`asked(path, bodies)`: the answers of a server that has this endpoint in earnest."""

    def ask(path, bodies, **headers):
        pools = {**dict.fromkeys(POOLING, EMBEDS), "/classify": CLASSES}.get(path)
        engine = (
            {}
            if pools is None
            else {"executor": FakePoolingExecutor(pools.width), "pooler": pools, "runner": "pooling"}
        )

        async def ask_all():
            client = Client(create_app(make_service(**engine)))
            return [await client.post(path, body, **headers) for body in bodies]

        return asyncio.run(ask_all())

    return ask


def test_every_endpoint_with_a_body_is_attacked():
    paths = {each.path for each in public_endpoints(make_service()) if each.body is not None}
    assert paths == {*BODIES, *ALIASES}


@pytest.mark.parametrize("path", sorted(set(BODIES) - {"/detokenize"}))
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])
def test_invalid_utf8_in_a_text_is_400(asked, path, bad):
    """Before, what the JSON library raised for it was a 500 with a traceback in the log."""
    [answer] = asked(path, [json.dumps(BODIES[path], ensure_ascii=False).encode().replace("ü".encode(), bad)])
    assert answer.status == 400 and b"UTF-8" in answer.body, answer.body


@pytest.mark.parametrize("path", BODIES)
def test_invalid_utf8_in_a_name_that_nobody_knows_is_400(asked, path):
    """Before, it passed: the JSON library skips what it does not know, and looks at none of it."""
    whole = json.dumps(BODIES[path], ensure_ascii=False).encode()
    bodies = [b'{"x%b": 1, ' % bad + whole[1:] for bad in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xe2\x82")]
    bodies.append(b'{"x": {"y": ["\xff"]}, ' + whole[1:])
    for body, answer in zip(bodies, asked(path, bodies)):
        assert answer.status == 400 and b"UTF-8" in answer.body, body


class Request:
    """What `body.py` sees of one; `app` is that of several."""

    headers: ClassVar = {"content-type": "application/json"}

    def __init__(self, *pieces, app=None):
        self.pieces, self.app, self.scope = pieces, app, {}

    async def stream(self):
        for piece in self.pieces:
            yield piece


@pytest.mark.parametrize("length", [bodies_read.LONG_BODY, 4 * bodies_read.LONG_BODY])
def test_others_have_their_turn_between_long_bodies(monkeypatch, length):
    """Decoding one cannot be interrupted; that of all which came together would hold up everybody. The clock's
    milliseconds are rounds of the loop."""
    turns, at, decoded = 0, [], bodies_read.decoded

    def counted(text, kind):
        at.append(turns)
        return decoded(text, kind)

    async def read_all(app):
        async def look():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: turns * 0.001)
        looking = asyncio.ensure_future(look())
        long = b'{"prompt": "%b"}' % (b"a" * length)
        reading = [read_struct(Request(long, app=app), CompletionRequest, 2**24) for _ in range(4)]
        texts = await asyncio.gather(*reading)
        looking.cancel()
        return texts

    monkeypatch.setattr(bodies_read, "decoded", counted)
    app = create_app(make_service())
    assert all(len(each.prompt) == length for each in asyncio.run(read_all(app)))
    assert len(at) == 4 and min(b - a for a, b in itertools.pairwise(at)) > 6 * length / bodies_read.LONG_BODY


def test_a_character_may_come_in_pieces():
    """And its second half may be missing, or be another's."""
    euro = "€".encode()
    for pieces in ((euro[:1], euro[1:]), (euro[:2], euro[2:] + b"a"), (b"a", euro, b"b"), (euro[:1], b"", euro[1:])):
        assert asyncio.run(read_body(Request(*pieces), 100)) == b"".join(pieces)
    for pieces in ((euro[:1], b"a"), (euro[:2],), (euro[1:],), (b"a", b"\xff")):
        with pytest.raises(ServingError, match="UTF-8") as caught:
            asyncio.run(read_body(Request(*pieces), 100))
        assert status_of(caught.value) == 400


@pytest.mark.parametrize(
    ("unit", "few", "many"),
    [
        (b"7,", 1_900_000, 2_100_000),
        (b'"a",', 600_000, 700_000),
        (b'"abc":7,', 150_000, 200_000),
        (b"{},", 140_000, 160_000),
        (b"[7],", 140_000, 160_000),
    ],
)
def test_what_takes_the_decoder_long_is_refused_before_it_begins(unit, few, many):
    """Names of an object above all: 900,000 of them took 0.7 s, in which nobody else was served."""

    class Request:
        headers: ClassVar = {}

        def __init__(self, count):
            self.count = count

        async def stream(self):
            yield unit * self.count

    asyncio.run(read_body(Request(few), 2**25))
    with pytest.raises(ServingError, match="Send several requests") as caught:
        asyncio.run(read_body(Request(many), 2**25))
    assert status_of(caught.value) == 413


CODE = 'if (a[i] == "x\\"") { printf("%d: [%s]\\\\", a); }\n'
LONG_TEXTS = {
    "JSON": json.dumps([{"name": str(i), "values": [i, {}]} for i in range(60_000)]),
    "C": CODE * 40_000,
    "signs": '{[,:"' * 500_000,
    "backslashes": '\\"' * 900_000,
}


@pytest.mark.parametrize("size", [1, 7, 65_536, 2**24])
@pytest.mark.parametrize("kind", LONG_TEXTS)
def test_signs_inside_of_a_text_are_no_values(kind, size):
    """Before, a body of three values was refused for 2,000,000: signs were counted wherever they stood. Pieces end
    anywhere, between a backslash and what it escapes, too."""
    text = LONG_TEXTS[kind] if size > 7 else LONG_TEXTS[kind][: size * 20_000]
    body = json.dumps({"prompt": text, "max_tokens": 1, "x": [text[:99]]}).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    assert json.loads(asyncio.run(read_body(Request(*pieces), 2**25)))["prompt"] == text


@pytest.mark.parametrize("size", [1, 7, 65_536])
@pytest.mark.parametrize("text", ["", "\\", '"', 'a\\"', '\\\\"{'])
def test_values_after_a_text_are_counted_wherever_a_piece_ends(text, size, monkeypatch):
    monkeypatch.setattr(bodies_read, "MOST_VALUES", 12_000)
    body = json.dumps([text] * 2_000 + [{}] * 1_000).encode()
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    with pytest.raises(ServingError, match="Send several requests"):
        asyncio.run(read_body(Request(*pieces), 2**25))
    monkeypatch.setattr(bodies_read, "MOST_VALUES", 30_000)
    asyncio.run(read_body(Request(*pieces), 2**25))


@pytest.mark.parametrize("path", BODIES)
def test_mutated_bodies_are_served_or_refused_and_never_a_500(asked, path, caplog):
    draw, whole = random.Random(path), json.dumps(BODIES[path], ensure_ascii=False).encode()
    bodies = [mutated(draw, whole) for _ in range(150)]
    for body, answer in zip(bodies, asked(path, [whole, *bodies])[1:]):
        assert answer.status in (200, 400, 404), (body, answer.body)
        assert answer.status == 200 or answer.error["message"], body
    assert not caplog.records


@pytest.mark.parametrize("path", [*BODIES, "/v1/models", "/health", "/metrics"])
@pytest.mark.parametrize("value", ["two words", "a" * 129, "ü", "", "\x7f"])
def test_a_bad_request_id_in_the_header_is_refused_by_its_name_everywhere(serving, path, value):
    """Before, only the endpoints that make an id of it looked at it, and an empty one was taken for none."""

    async def scenario(server):
        if path in BODIES:
            return await server.client.post(path, BODIES[path], x_request_id=value)
        return await server.client.get(path, x_request_id=value)

    answer = serving(scenario)
    assert answer.status == 400 and b"X-Request-Id" in answer.body


def test_a_grammar_that_turns_out_too_much_when_it_is_followed_is_the_fault_of_its_field():
    class Broken:
        error = "Too many items"

    class Request:
        matcher = Broken()

    assert fault_of(Request(), "no token") == (
        "structured_outputs cannot be followed: Too many items",
        "structured_outputs",
    )
    Request.matcher = None
    assert fault_of(Request(), "no token") == ("no token", None)
