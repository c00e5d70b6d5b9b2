"""Calls that compute are part of the trace that their metadata name."""

import asyncio

import pytest

from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.engine.collector import PARENT_ID, TRACE_ID, TRACEPARENT, grpc_collector
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor

METADATA = (("traceparent", TRACEPARENT), ("tracestate", "a=1"))
SHORT = pb.SamplingParams(max_tokens=3, temperature=0)


@pytest.fixture
def collector():
    with grpc_collector() as collector:
        yield collector


@pytest.fixture
def traced(serving, collector):
    """`traced(scenario, count, ...)` runs `await scenario(stub)`; the spans of its prompts, by request id."""

    def run(scenario, count, **settings):
        async def whole(server):
            await scenario(server.stub)
            while len(server.service.traffic):
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.engine.engine.shutdown)

        serving(whole, otlp_traces_endpoint=collector.endpoint, **settings)
        return {span.attributes["gen_ai.request.id"]: span for span in collector.wait_for(count)}

    return run


def request(name):
    return pb.GenerateRequest(request_id=name, text="ab", sampling_params=SHORT)


def test_generate(traced):
    async def scenario(stub):
        async for _ in stub.Generate(request("a"), metadata=METADATA):
            pass
        async for _ in stub.Generate(request("b")):
            pass

    spans = traced(scenario, 2)
    assert (spans["grpc-a"].trace_id, spans["grpc-a"].parent_id) == (TRACE_ID, PARENT_ID)
    assert spans["grpc-a"].trace_state == "a=1"
    assert spans["grpc-b"].parent_id == "" and spans["grpc-b"].trace_id != TRACE_ID


def test_all_requests_of_a_stream_have_its_parent(traced):
    async def scenario(stub):
        messages = [pb.GenerateStreamRequest(generate=request(name)) for name in "ab"]
        async for _ in stub.GenerateStream(iter(messages), metadata=METADATA):
            pass

    spans = traced(scenario, 2)
    assert set(spans) == {"grpc-a", "grpc-b"}
    assert {span.parent_id for span in spans.values()} == {PARENT_ID}


def test_vectors_and_scores(traced):
    async def scenario(stub):
        await stub.Embed(pb.EmbedRequest(request_id="e", inputs=[pb.Input(text="the cat")]), metadata=METADATA)
        pair = pb.ScoreRequest(request_id="s", queries=["the cat"], documents=["a dog"])
        await stub.Score(pair, metadata=METADATA)

    settings = {"pooler": EMBEDS, "executor": FakePoolingExecutor(EMBEDS.width), "runner": "pooling"}
    spans = traced(scenario, 3, **settings)
    assert set(spans) == {"grpc-e", "grpc-s"}
    assert {span.parent_id for span in spans.values()} == {PARENT_ID}
