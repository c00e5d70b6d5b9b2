"""Every generating endpoint puts its requests into the trace that their headers name, under the id that clients see."""

import asyncio

import pytest

from tests.engine.collector import PARENT_ID, TRACE_ID, TRACEPARENT, http_collector
from tests.engine.fake_pooling import CLASSES, EMBEDS, FakePoolingExecutor

SHORT = {"max_tokens": 3, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "the cat"}], **SHORT}
RESPONSE = {"input": "the cat", "max_output_tokens": 3}
GENERATING = [
    ("/v1/completions", {"prompt": "ab", **SHORT}),
    ("/v1/completions", {"prompt": "ab", "stream": True, **SHORT}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/messages", {**CHAT, "model": "fake"}),
    ("/v1/messages", {**CHAT, "model": "fake", "stream": True}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/v1/responses", {**RESPONSE, "background": True}),
]
PAIR = {"queries": "the cat", "documents": "a small bird"}
POOLING = [
    ("/v1/embeddings", {"input": "the cat"}, EMBEDS, 1),
    ("/pooling", {"input": ["the cat", "a dog"]}, EMBEDS, 2),
    ("/classify", {"input": "the cat"}, CLASSES, 1),
    ("/score", PAIR, EMBEDS, 2),
    ("/rerank", {"query": "the cat", "documents": ["a dog", "a bird"]}, EMBEDS, 3),
]


@pytest.fixture
def collector():
    with http_collector() as collector:
        yield collector


async def end(server):
    """Wait for what is under way, and have all spans sent."""
    while len(server.service.traffic):
        await asyncio.sleep(0.005)
    await asyncio.to_thread(server.engine.engine.shutdown)


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_a_request_is_part_of_the_trace_that_it_names(serving, collector, path, body):
    async def scenario(server):
        answer = await server.client.post(path, body, traceparent=TRACEPARENT, tracestate="a=1", x_request_id="mine")
        await end(server)
        return answer

    answer = serving(scenario, otlp_traces_endpoint=collector.endpoint)
    assert answer.status == 200, answer.body
    [span] = collector.wait_for(1)
    assert (span.trace_id, span.parent_id, span.trace_state) == (TRACE_ID, PARENT_ID, "a=1")
    assert len(collector.spans) == 4 and len(collector.below(span)) == 3
    request_id = span.attributes["gen_ai.request.id"]
    assert request_id.encode() in answer.body
    assert request_id.endswith("-mine") or path == "/v1/responses", "those have ids of their own"


@pytest.mark.parametrize(("path", "body", "pooler", "count"), POOLING)
def test_prompts_that_are_pooled_are_too(serving, collector, path, body, pooler, count):
    async def scenario(server):
        answer = await server.client.post(path, body, traceparent=TRACEPARENT, x_request_id="mine")
        await end(server)
        return answer

    settings = {"executor": FakePoolingExecutor(pooler.width), "pooler": pooler, "runner": "pooling"}
    answer = serving(scenario, otlp_traces_endpoint=collector.endpoint, **settings)
    assert answer.status == 200, answer.body
    spans = collector.wait_for(count)
    assert {span.parent_id for span in spans} == {PARENT_ID} and len(collector.spans) == 3 * count
    assert {span.attributes["gen_ai.request.id"] for span in spans} == {answer.json["id"]}


def test_prompts_of_a_request_are_neighbours_and_beams_below_one_parent(serving, collector):
    async def scenario(server):
        post = server.client.post
        await post("/v1/completions", {"prompt": ["ab", "cd"], **SHORT}, traceparent=TRACEPARENT)
        beams = {"prompt": "ab", "use_beam_search": True, "n": 2, **SHORT}
        answer = await post("/v1/completions", beams, traceparent=TRACEPARENT)
        await end(server)
        return answer

    answer = serving(scenario, otlp_traces_endpoint=collector.endpoint)
    spans = collector.wait_for(3)
    assert {span.parent_id for span in spans} == {PARENT_ID}
    assert len({span.attributes["gen_ai.request.id"] for span in spans[:2]}) == 1
    assert {span.attributes["gen_ai.request.id"] for span in spans[2:]} == {answer.json["id"]}


def test_requests_do_not_get_into_the_traces_of_others(serving, collector):
    """At the same time and after one another, with a header, without one, and with two parents, which are none."""
    other = TRACEPARENT.replace(TRACE_ID, "a" * 32)

    async def scenario(server):
        async def ask(name, **headers):
            await server.client.post("/v1/completions", {"prompt": "ab", **SHORT}, x_request_id=name, **headers)

        await asyncio.gather(ask("a", traceparent=TRACEPARENT), ask("b"), ask("c", traceparent=other))
        await ask("d")
        await ask("e", traceparent=other, Traceparent=TRACEPARENT)  # two of one name: the client keeps both
        await end(server)

    serving(scenario, otlp_traces_endpoint=collector.endpoint)
    spans = {span.attributes["gen_ai.request.id"][-1]: span for span in collector.wait_for(5)}
    assert [spans[name].trace_id for name in "ac"] == [TRACE_ID, "a" * 32]
    own = {spans[name].trace_id for name in "bde"}
    assert len(own) == 3 and not own & {TRACE_ID, "a" * 32}
    assert {spans[name].parent_id for name in "bde"} == {""}


def test_headers_mean_nothing_where_nothing_is_traced(ask):
    answer = ask("/v1/completions", {"prompt": "ab", **SHORT}, headers={"traceparent": TRACEPARENT})
    assert answer.status == 200
