"""Shapes are checked in turns that are fair to all clients, before the engine hears of them."""

import asyncio
import threading

import pytest

from jaxpaged.engine.core_calls import KeepLease
from jaxpaged.engine.input.grammar_checker import GrammarRefused
from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.generation.grammar_desk import GrammarDesk
from jaxpaged.errors import RequestError
from jaxpaged.structured_outputs import StructuredOutputsParams
from tests.engine.test_kv_transfer import BORROWS
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service


class GatedChecker:
    """Grammars whose text begins with "bad" take until `gate` opens, and are refused then."""

    def __init__(self):
        self.gate, self.begun, self.known = threading.Event(), [], set()

    def is_known(self, params):
        return params.regex in self.known

    def check(self, params):
        if params.regex in self.known:
            return 0.0
        self.begun.append(params.regex)
        if params.regex.startswith("bad"):
            assert self.gate.wait(20)
            raise GrammarRefused("structured_outputs cannot be used: too hard.", 5.0)
        self.known.add(params.regex)
        return 0.01


def shape(text):
    return StructuredOutputsParams(regex=text)


def test_while_one_client_has_eight_hard_grammars_checked_another_does_not_wait():
    """Before, four of them held all places until the compiler was done."""

    async def scenario():
        checker = GatedChecker()
        desk = GrammarDesk(checker)
        attack = [asyncio.ensure_future(desk.check(shape(f"bad{i}"), "attacker")) for i in range(8)]
        await asyncio.sleep(0)
        await asyncio.wait_for(desk.check(shape("good"), "user"), 10)
        assert "good" in checker.begun and len(checker.begun) <= 3
        checker.gate.set()
        results = await asyncio.gather(*attack, return_exceptions=True)
        assert all(isinstance(each, RequestError) for each in results)

    asyncio.run(scenario())


def test_a_client_that_leaves_keeps_its_turn_until_the_computing_ends():
    async def scenario():
        checker = GatedChecker()
        desk = GrammarDesk(checker)
        for i in range(6):
            leaving = asyncio.ensure_future(desk.check(shape(f"bad{i}"), "attacker"))
            await asyncio.sleep(0.01)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        assert len(checker.begun) == 2 and desk._turns._running["attacker"] == 2
        checker.gate.set()
        while len(desk._turns):
            await asyncio.sleep(0.001)

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
        checker = service._grammars._checker = GatedChecker()
        checker.gate.set()
        answer = await Client(create_app(service)).post(path, body)
        assert (answer.status, answer.error["param"]) == (400, parameter), answer.body
        assert checker.begun == ["bad"]

    asyncio.run(scenario())


def test_what_another_engine_lends_is_kept_while_a_grammar_is_checked():
    async def scenario():
        service, told = make_service(), []

        async def call(said):
            told.append(said)

        checker = service._grammars._checker = GatedChecker()
        service.engine.call = call
        body = {"prompt": "a", "structured_outputs": {"regex": "bad"}, **BORROWS}
        asked = asyncio.ensure_future(Client(create_app(service)).post("/v1/completions", body))
        while not checker.begun:
            await asyncio.sleep(0.001)
        assert told == [KeepLease(BORROWS["kv_transfer_params"])]
        checker.gate.set()
        assert (await asked).status == 400
        assert told[1:] == [KeepLease(BORROWS["kv_transfer_params"], is_needed=False)]

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_a_client_is_its_key_where_keys_are_needed_and_its_address_where_not(keys):
    async def scenario():
        seen, service = [], make_service()
        service.check_shape_for = lambda who: seen.append(who) or (lambda shape: asyncio.sleep(0))
        client = Client(create_app(service, keys))
        for key in ("one", "two", "one"):
            assert (await client.post("/v1/completions", {"prompt": "a"}, authorization=f"Bearer {key}")).status == 200
        return seen

    first, second, third = asyncio.run(scenario())
    assert first == third and (first != second if keys else first == second == "127.0.0.1")
    assert "one" not in first
