"""Shapes are checked in turns that are fair to all clients, before the engine hears of them."""

import asyncio
import json
import threading

import pytest

from jaxpaged.engine.core_calls import KeepLease
from jaxpaged.engine.input.grammar_checker import GrammarRefused
from jaxpaged.entrypoints.http import respond
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.responses import routes as responses_routes
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from jaxpaged.serving.grammar_checks import NUM_HARD, GrammarChecks
from jaxpaged.serving.requests import RequestContext
from tests.engine.test_kv_transfer import CONSUMES
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service


class GatedCheck:
    def __init__(self, checker, text):
        self.checker, self.text, self.size, self.seconds, self.dropped = checker, text, len(text), 0.0, False

    def run(self, seconds):
        checker = self.checker
        checker.begun.append(self.text)
        self.seconds += 0.01
        if not self.text.startswith("bad"):
            checker.known.add(self.text)
            return True
        if seconds < 10:
            self.seconds += seconds
            return False
        checker.hard.append(self.text)
        while not checker.gate.wait(0.001):
            if self.dropped:
                return True
        raise GrammarRefused("structured_outputs cannot be used: too hard.", 5.0)

    def drop(self):
        self.dropped = True
        self.checker.dropped.append(self.text)


class GatedChecker:
    """Grammars whose text begins with "bad" are not known after a moment; then they take until `gate` opens, and are
    refused. `begun`: what was looked at, in order; `hard`: what took longer."""

    def __init__(self):
        self.gate, self.begun, self.hard, self.dropped, self.known = threading.Event(), [], [], [], set()

    def is_known(self, params):
        return params.regex in self.known

    def check(self, params):
        assert params.regex in self.known

    def begin(self, params):
        return GatedCheck(self, params.regex)


def shape(text):
    return StructuredOutputsParams(regex=text)


@pytest.mark.parametrize(
    "user", [RequestContext("user"), RequestContext("attacker"), RequestContext("attacker", "user")]
)
def test_an_ordinary_grammar_does_not_wait_for_eight_hard_ones_whoever_sent_them(user):
    """Before, it did when it came from their address; and before that, from any."""

    async def scenario():
        checker = GatedChecker()
        desk = GrammarChecks(checker)
        attack = [asyncio.ensure_future(desk.check(shape(f"bad{i:09}"), RequestContext("attacker"))) for i in range(8)]
        while len(checker.hard) < NUM_HARD:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(desk.check(shape("good"), user), 10)
        assert len(checker.hard) == NUM_HARD
        checker.gate.set()
        results = await asyncio.gather(*attack, return_exceptions=True)
        assert all(isinstance(each, RequestError) for each in results)
        desk.close()

    asyncio.run(scenario())


def test_of_one_client_the_smallest_is_looked_at_first():
    async def scenario():
        checker = GatedChecker()
        desk = GrammarChecks(checker)
        checks = [
            asyncio.ensure_future(desk.check(shape("x" * size), RequestContext("a"))) for size in (9, 8, 7, 6, 5, 1)
        ]
        await asyncio.gather(*checks)
        assert checker.begun.index("x") < checker.begun.index("x" * 6)
        desk.close()

    asyncio.run(scenario())


def test_a_client_that_leaves_takes_its_work_with_it():
    async def scenario():
        checker = GatedChecker()
        desk = GrammarChecks(checker)
        leaving = [asyncio.ensure_future(desk.check(shape(f"bad{i}"), RequestContext("attacker"))) for i in range(8)]
        while len(checker.hard) < NUM_HARD:
            await asyncio.sleep(0.001)
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert sorted(checker.dropped) == [f"bad{i}" for i in range(8)]
        while len(desk._hard) or len(desk._short):  # without the gate
            await asyncio.sleep(0.001)
        assert len(checker.hard) == NUM_HARD
        desk.close()

    asyncio.run(scenario())


def test_a_client_that_closes_its_connection_takes_its_work_back():
    async def scenario():
        service, left = make_service(), asyncio.Event()
        checker = service.grammars._checker = GatedChecker()
        body = json.dumps({"prompt": "a", "structured_outputs": {"regex": "bad"}}).encode()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            message = next(messages, None)
            if message is None:
                await left.wait()
            return message or {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        sent, headers = [], [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "headers": headers,
            "query_string": b"",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
            "asgi": {"version": "3.0"},
        }
        asked = asyncio.ensure_future(create_app(service)(scope, receive, send))
        while not checker.hard:
            await asyncio.sleep(0.001)
        left.set()
        await asyncio.wait_for(asked, 10)
        assert checker.dropped == ["bad"] and sent[0]["status"] == 499

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "bad"}}, "structured_outputs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "bad"}},
            "structured_outputs",
        ),
        ("/v1/responses", {"input": "a", "store": False, "structured_outputs": {"regex": "bad"}}, "structured_outputs"),
    ],
)
def test_every_endpoint_has_its_shapes_checked_there(path, body, parameter):
    async def scenario():
        service = make_service()
        checker = service.grammars._checker = GatedChecker()
        checker.gate.set()
        answer = await Client(create_app(service)).post(path, body)
        assert (answer.status, answer.error["param"]) == (400, parameter), answer.body
        assert checker.begun == ["bad", "bad"]

    asyncio.run(scenario())


def test_what_another_engine_lends_is_kept_while_a_grammar_is_checked():
    async def scenario():
        service, told = make_service(), []

        async def call(said):
            told.append(said)

        checker = service.grammars._checker = GatedChecker()
        service.engine.call = call
        body = {"prompt": "a", "structured_outputs": {"regex": "bad"}, **CONSUMES}
        asked = asyncio.ensure_future(Client(create_app(service)).post("/v1/completions", body))
        while not checker.hard:
            await asyncio.sleep(0.001)
        assert told == [KeepLease(CONSUMES["kv_transfer_params"])]
        checker.gate.set()
        assert (await asked).status == 400
        assert told[1:] == [KeepLease(CONSUMES["kv_transfer_params"], is_needed=False)]

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_a_client_is_its_key_where_keys_are_needed_and_its_address_where_not(keys, monkeypatch):
    async def scenario():
        client, seen = asked_by(monkeypatch, keys)
        for key in ("one", "two", "one"):
            assert (await client.post("/v1/completions", {"prompt": "a"}, authorization=f"Bearer {key}")).status == 200
        return [asker.client for asker in seen]

    first, second, third = asyncio.run(scenario())
    assert first == third and (first != second if keys else first == second == "127.0.0.1")
    assert "one" not in first


def asked_by(monkeypatch, keys=()):
    """(A client, and for each of its requests who the server takes it for)."""
    seen = []

    async def check_shape(service, generation, asker):
        seen.append(asker)

    for module in (respond, responses_routes):
        monkeypatch.setattr(module, "check_shape", check_shape)
    return Client(create_app(make_service(), keys)), seen


CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "user": "u7"}),
        ("/v1/chat/completions", {**CHAT, "user": "u7"}),
        ("/v1/chat/completions", {**CHAT, "safety_identifier": "u7"}),
        ("/v1/responses", {"input": "a", "store": False, "user": "u7"}),
        ("/v1/messages", {**CHAT, "model": "fake", "max_tokens": 3, "metadata": {"user_id": "u7"}}),
    ],
)
def test_users_are_told_apart_by_what_a_body_says_of_them(path, body, monkeypatch):
    async def scenario():
        client, seen = asked_by(monkeypatch)
        assert (await client.post(path, body)).status == 200
        assert [(asker.client, asker.user) for asker in seen] == [("127.0.0.1", "u7")]

    asyncio.run(scenario())
