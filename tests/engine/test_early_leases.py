"""A lease does not end because the request that needs it waits for its grammar to be checked."""

import asyncio

import pytest

from jaxpaged.engine.core_calls import KeepLease
from jaxpaged.engine.early_leases import lease_kept_meanwhile
from jaxpaged.errors import EngineDeadError, RequestError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams
from tests.engine.fake_engine import make_engine
from tests.engine.test_kv_transfer import CONSUMES, PRODUCES

SHAPE = StructuredOutputsParams(regex="a+")
LENT = CONSUMES["kv_transfer_params"]
KEPT, LET_GO = KeepLease(LENT), KeepLease(LENT, is_needed=False)


class Checker:
    """Refuses every grammar but those that are known; `asked` when one is checked."""

    def __init__(self, *known, asked=lambda: None):
        self.known, self.asked = known, asked

    def is_known(self, shape):
        return shape in self.known

    def check(self, shape):
        self.asked()
        raise RequestError("no", "structured_outputs")


def bound(extra_args=CONSUMES, shape=SHAPE):
    return SamplingParams(max_tokens=2, structured_outputs=shape, extra_args=extra_args)


@pytest.mark.parametrize(
    ("params", "known", "told"),
    [
        (bound(), (), [KEPT, LET_GO]),
        (bound(), (SHAPE,), []),
        (bound(shape=None), (), []),
        (bound(PRODUCES), (), []),
        (bound(None), (), []),
        (bound({"kv_transfer_params": {**LENT, "remote_port": 1 << 16}}), (), []),
    ],
    ids=["to be checked", "known", "no grammar", "computes for others", "alone", "of a port that is none"],
)
def test_an_engine_says_that_a_lease_is_needed_before_it_checks_the_grammar(params, known, told, monkeypatch):
    calls, heard = [], []
    checker = Checker(*known, asked=lambda: heard.extend(calls))
    engine, _ = make_engine(grammar_checker=checker)
    monkeypatch.setattr(engine._core, "call", calls.append)
    try:
        engine.add_request("a", "b", params)
    except RequestError:
        assert heard == told[:1], "before it is looked at"
    assert calls == told


def scenario(act, call):
    async def run():
        async with lease_kept_meanwhile(call, Checker(), bound()):
            await act()

    return run()


def test_in_an_event_loop_the_lease_is_kept_meanwhile_and_let_go_of_where_the_request_does_not_come():
    told = []

    async def call(said):
        told.append(said)
        await asyncio.sleep(0)

    async def passes():
        await asyncio.sleep(0)
        assert told == [KEPT]

    asyncio.run(scenario(passes, call))
    assert told == [KEPT]
    told.clear()
    leaves = scenario(lambda: asyncio.sleep(60), call)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(leaves, 0.05))
    assert told == [KEPT, LET_GO]


def test_a_core_that_does_not_answer_is_not_this_ones_trouble():
    told, came = [], []

    async def call(said):
        told.append(said)
        raise EngineDeadError("the engine has stopped.")

    async def comes():
        await asyncio.sleep(0)
        came.append(list(told))

    asyncio.run(scenario(comes, call))
    assert came == [[KEPT]]


@pytest.mark.parametrize("prompt", ["b " * 500, {"prompt_token_ids": [10**6]}, {"prompt_token_ids": []}])
def test_an_engine_that_refuses_a_request_gives_its_lease_back(prompt, monkeypatch):
    calls = []
    engine, _ = make_engine(kv_role="kv_both")
    monkeypatch.setattr(engine._core, "call", calls.append)
    with pytest.raises(RequestError):
        engine.add_request("a", prompt, bound(shape=None))
    assert calls == [LET_GO]
    with pytest.raises(RequestError):
        engine.add_request("a", prompt, bound(PRODUCES, shape=None))
    assert calls == [LET_GO]
