"""A consumer that is slower than the engine misses nothing."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.engine.output.stream import OutputStream
from jaxpaged.errors import EngineDeadError
from jaxpaged.messages import CompletionOutput, Logprob, RequestOutput


def delta(*completions, finished=False, prompt_logprobs=None):
    return RequestOutput("r", "p", [1], prompt_logprobs, list(completions), finished)


def piece(index, text, ids, reason=None):
    logprobs = [{i: Logprob(-0.5)} for i in ids]
    return CompletionOutput(index, text, ids, -1.0 * len(ids), logprobs, reason)


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.booleans()), min_size=1, max_size=12))
def test_deltas_that_wait_become_one_and_nothing_is_lost(arrivals):
    async def consume():
        stream, got = OutputStream(by_delta=True), []
        for number, (index, text, taken) in enumerate(arrivals):
            stream.put(delta(piece(index, text, [number]), prompt_logprobs=None if number else [None]))
            if taken:
                got.append(await stream.get())
        stream.put(delta(piece(0, "", [99], "stop"), finished=True))
        return [*got, await stream.get()]

    got = asyncio.run(consume())
    for index in range(3):
        mine = [c for output in got for c in output.outputs if c.index == index]
        expected = [(number, text) for number, (i, text, _) in enumerate(arrivals) if i == index]
        assert "".join(c.text for c in mine) == "".join(text for _, text in expected)
        ids = [token_id for c in mine for token_id in c.token_ids if token_id != 99]
        assert ids == [number for number, _ in expected]
        assert [next(iter(line)) for c in mine for line in c.logprobs if 99 not in line] == ids
    assert [output.finished for output in got] == [False] * (len(got) - 1) + [True]
    assert sum(output.prompt_logprobs is not None for output in got) == 1
    assert next(c for c in got[-1].outputs if c.index == 0).finish_reason == "stop"


def test_of_results_that_hold_everything_the_last_is_enough():
    async def consume():
        stream = OutputStream(by_delta=False)
        stream.put(delta(piece(0, "a", [1])))
        stream.put(delta(piece(0, "ab", [1, 2])))
        return await stream.get()

    assert asyncio.run(consume()).outputs[0].text == "ab"


def test_what_is_taken_where_it_arises_is_not_given_out_again():
    """Results are taken while the consumer waits, unless they are refused, the last, or long to read."""

    async def consume():
        taken, wanted = [], [True]
        stream = OutputStream(by_delta=True, take=lambda output: wanted[0] and not taken.append(output))
        stream.put(delta(piece(0, "a", [1])))  # nobody waits yet
        got = [await stream.get()]

        async def next_after(*outputs):
            waiting = asyncio.ensure_future(stream.get())
            await asyncio.sleep(0)
            for output in outputs:
                stream.put(output)
            got.append(await waiting)

        await next_after(delta(piece(0, "b", [2])), delta(piece(0, "c", [3]), prompt_logprobs=[None]))
        wanted[0] = False
        await next_after(delta(piece(0, "d", [4])), delta(piece(0, "e", [5])))
        wanted[0] = True
        await next_after(delta(piece(0, "f", [6])), delta(piece(0, "", [7], "stop"), finished=True))
        return [output.outputs[0].text for output in taken], [output.outputs[0].text for output in got]

    assert asyncio.run(consume()) == (["b", "f"], ["a", "c", "de", ""])


def test_where_taking_fails_the_consumer_hears_of_it():
    async def consume():
        stream = OutputStream(by_delta=True, take=lambda output: 1 / 0)
        waiting = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.put(delta(piece(0, "a", [1])))
        with pytest.raises(ZeroDivisionError):
            await waiting

    asyncio.run(consume())


def test_an_error_reaches_who_waits_and_who_comes_later():
    async def consume():
        stream = OutputStream(by_delta=True)
        waiting = asyncio.ensure_future(stream.get())
        await asyncio.sleep(0)
        stream.fail(EngineDeadError("gone"))
        for awaited in (waiting, stream.get()):
            with pytest.raises(EngineDeadError, match="gone"):
                await awaited

    asyncio.run(consume())
