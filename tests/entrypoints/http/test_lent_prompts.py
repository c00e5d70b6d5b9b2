"""A request that is refused, for whatever reason, gives back what another engine lends for it."""

import asyncio

import pytest

from jaxpaged.engine.core_calls import KeepLease
from tests.engine.test_kv_transfer import CONSUMES

LENT = CONSUMES["kv_transfer_params"]
TEXT = {"prompt": "one two", "max_tokens": 2, "kv_transfer_params": LENT}
CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2, "kv_transfer_params": LENT}
INPUT = {"input": "one", "max_output_tokens": 16, "kv_transfer_params": LENT}
PATHS = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT, "/v1/responses": INPUT, "/invocations": TEXT}
BAD = {
    "a number out of range": {"temperature": -1},
    "a text for a number": {"temperature": "warm"},
    "an unknown model": {"model": "another"},
    "an unknown field": {"kv_transfer_parms": 1},
    "a bad seed": {"seed": "x"},
}
TEXTS = {
    "too long": {"prompt": "one " * 500},
    "a bad regex": {"structured_outputs": {"regex": "("}},
    "two prompts": {"prompt": ["one", "two"]},
    "no prompt": {"prompt": None},
    "a logit bias of no token": {"logit_bias": {"99999": 1}},
    "too much": {"max_tokens": 10**9},
    "a token of no vocabulary": {"prompt": [10**8]},
    "both at once": {"kv_transfer_params": {**LENT, "do_remote_decode": True}},
}
CASES = [(path, name) for path in PATHS for name in BAD] + [("/v1/completions", name) for name in TEXTS]


class Heard:
    """What the engine is told of leases."""

    def __init__(self, engine):
        self.calls, self._call = [], engine.call
        engine.call = self.call
        engine.engine.call = lambda call: self.calls.append(call) if isinstance(call, KeepLease) else None

    async def call(self, call):
        if isinstance(call, KeepLease):
            self.calls.append(call)
            return None
        return await self._call(call)

    @property
    def given_back(self):
        return bool(self.calls) and self.calls[-1] == KeepLease(LENT, is_needed=False)


@pytest.mark.parametrize(("path", "name"), CASES)
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_a_request_is_refused_for_its_lease_is_given_back(serving, path, name, stream):
    async def scenario(server):
        heard = Heard(server.engine)
        answer = await server.client.post(path, {**PATHS[path], **{**BAD, **TEXTS}[name], "stream": stream})
        assert 400 <= answer.status < 500, answer.body
        is_possible = name != "both at once"
        assert heard.given_back is is_possible, heard.calls

    serving(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_one_for_which_there_is_no_room_gives_it_back_and_so_does_one_that_a_dead_engine_gets(serving, stream):
    async def scenario(server):
        heard = Heard(server.engine)
        server.engine.go_on.clear()
        others = [
            asyncio.ensure_future(server.client.post("/v1/completions", {"prompt": "a", "max_tokens": 3}))
            for _ in range(20)
        ]
        await asyncio.sleep(0.05)
        answer = await server.client.post("/v1/completions", {**TEXT, "stream": stream})
        assert answer.status == 429 and heard.given_back
        server.engine.go_on.set()
        await asyncio.gather(*others)
        heard.calls.clear()
        server.engine.is_dead = True
        answer = await server.client.post("/v1/completions", {**TEXT, "stream": stream})
        assert answer.status == 500 and heard.given_back

    serving(scenario, options={"max_num_queued_reqs": 1})


def test_others_tell_the_engine_nothing(serving):
    async def scenario(server):
        heard = Heard(server.engine)
        bodies = [
            {"temperature": -1},
            {"temperature": -1, "kv_transfer_params": {"do_remote_decode": True}},
            {"temperature": -1, "kv_transfer_params": [1]},
            {"user": "do_remote_prefill", "temperature": -1},
            {"temperature": -1, "kv_transfer_params": {**LENT, "remote_port": 1 << 20}},
        ]
        for body in bodies:
            assert (await server.client.post("/v1/completions", {"prompt": "one", **body})).status == 400
        assert not heard.calls

    serving(scenario)
