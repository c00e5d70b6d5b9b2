"""What is under way: limits of the queue, ids, and coming to rest."""

import asyncio
import contextlib

import pytest

from jaxpaged.serving.admission import Load, Traffic
from jaxpaged.serving.errors import ErrorKind, ServingError


def admit(traffic, request_id, sequences=1, tokens=10):
    ids = [f"{request_id}-{i}" for i in range(2)]
    return traffic.admitted(Load(request_id, ids, sequences, tokens))


def test_what_is_admitted_counts_until_its_context_ends():
    traffic = Traffic(max_running=4)
    with admit(traffic, "a"), admit(traffic, "b"):
        assert len(traffic) == 2
        assert traffic.engine_ids() == ["a-0", "a-1", "b-0", "b-1"]
        assert traffic.engine_ids(["b", "unknown"]) == ["b-0", "b-1"]
    assert len(traffic) == 0


def test_requests_with_the_same_id_count_each():
    traffic = Traffic(max_running=4)
    with admit(traffic, "a"), admit(traffic, "a"):
        assert len(traffic) == 2 and len(traffic.engine_ids(["a"])) == 4


@pytest.mark.parametrize(("limit", "admitted"), [(None, 20), (0, 4), (3, 7)])
def test_a_full_queue_refuses_and_says_when_to_come_back(limit, admitted):
    traffic = Traffic(max_running=4, max_queued=limit)
    with contextlib.ExitStack() as stack:
        for number in range(admitted):
            stack.enter_context(admit(traffic, str(number)))
        if limit is not None:
            with pytest.raises(ServingError, match=f"at most {limit} may") as refusal:
                stack.enter_context(admit(traffic, "one more"))
            assert refusal.value.kind is ErrorKind.TOO_MANY and refusal.value.retry_after >= 1
    assert len(traffic) == 0


def test_sequences_of_one_request_count_each():
    traffic = Traffic(max_running=4, max_queued=2)
    with admit(traffic, "a", sequences=6):
        pass
    with admit(traffic, "a"), pytest.raises(ServingError) as refusal, admit(traffic, "b", sequences=6):
        pass
    assert refusal.value.kind is ErrorKind.TOO_MANY


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize(
    ("limits", "sequences", "tokens", "number"),
    [
        ({"max_queued": 2}, 7, 10, "3 sequences"),
        ({"max_queued": 0}, 5, 10, "1 sequences"),
        ({"max_queued_tokens": 50}, 5, 60, "60 prompt tokens"),
    ],
)
def test_what_the_queue_could_never_take_is_not_told_to_come_back(limits, sequences, tokens, number, is_idle):
    """Before, it was told to try again later, for ever."""
    traffic = Traffic(max_running=4, **limits)
    with contextlib.ExitStack() as stack:
        if not is_idle:
            stack.enter_context(admit(traffic, "other", sequences=4))
        with pytest.raises(ServingError) as refusal:
            stack.enter_context(admit(traffic, "a", sequences, tokens))
    assert refusal.value.kind is ErrorKind.INVALID and refusal.value.retry_after is None
    assert refusal.value.parameter == "n"
    assert is_idle is False or number in str(refusal.value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"])
def test_one_request_larger_than_the_queue_is_a_400_on_every_endpoint(ask, path):
    many = {
        "/v1/completions": {"prompt": ["a"] * 9},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "n": 9},
        "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "a"}]] * 9},
    }[path]
    answer = ask(path, {**many, "max_tokens": 1}, options={"max_num_queued_reqs": 2}, max_num_seqs=4)
    assert answer.status == 400 and "Send several" in answer.error["message"], answer.body


def test_only_prompt_tokens_that_wait_count():
    traffic = Traffic(max_running=2, max_queued_tokens=100)
    with (
        admit(traffic, "running", sequences=2, tokens=1000),
        admit(traffic, "waiting", tokens=60),
        pytest.raises(ServingError, match="110 prompt tokens would wait"),
        admit(traffic, "too much", tokens=50),
    ):
        pass


def test_a_draining_server_takes_nothing_new():
    traffic = Traffic(max_running=4)
    traffic.draining = True
    with pytest.raises(ServingError) as refusal, admit(traffic, "a"):
        pass
    assert refusal.value.kind is ErrorKind.UNAVAILABLE and refusal.value.retry_after


def test_rest_comes_when_the_last_request_ends_or_not_in_time():
    async def scenario():
        traffic = Traffic(max_running=4)
        assert await traffic.wait_until_idle(0.01)
        with admit(traffic, "a"):
            assert not await traffic.wait_until_idle(0.01)
            waiting = asyncio.ensure_future(traffic.wait_until_idle(5))
            await asyncio.sleep(0)
        assert await waiting

    asyncio.run(scenario())


def test_requests_beyond_the_queue_get_429_over_http(serving):
    body = {"prompt": "a", "max_tokens": 2}

    async def scenario(server):
        server.engine.go_on.clear()
        waiting = [asyncio.ensure_future(server.client.post("/v1/completions", body)) for _ in range(2)]
        await asyncio.sleep(0.02)
        refused = await server.client.post("/v1/completions", {**body, "stream": True})
        load = (await server.client.get("/load")).json
        server.engine.go_on.set()
        return refused, load, [answer.status for answer in await asyncio.gather(*waiting)]

    refused, load, served = serving(scenario, options={"max_num_queued_reqs": 1}, max_num_seqs=1)
    assert refused.status == 429 and refused.headers["retry-after"] == "1"
    assert refused.error["type"] == "RateLimitError"
    assert load == {"server_load": 2} and served == [200, 200]
