"""`Embed` and `Score` give what HTTP gives."""

import grpc
import pytest

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.proto import jaxpaged_pb2 as pb
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor
from tests.entrypoints.http.asgi_client import Client

TEXTS = ["the cat", "a small bird"]


def pooling():
    """Settings of a server whose model pools."""
    return {"pooler": EMBEDS, "executor": FakePoolingExecutor(EMBEDS.width), "runner": "pooling"}


def test_embeddings(serving):
    async def scenario(server):
        http = Client(create_app(server.service))
        for inputs, given in (
            ([pb.Input(text=text) for text in TEXTS], TEXTS),
            ([pb.Input(token_ids=pb.TokenIds(ids=[6, 7]))], [[6, 7]]),
        ):
            answer = await server.stub.Embed(pb.EmbedRequest(inputs=inputs, request_id="mine"))
            over_http = (await http.post("/v1/embeddings", {"input": given})).json
            expected = [each["embedding"] for each in over_http["data"]]
            assert answer.request_id == "mine"
            assert len(answer.vectors) == len(expected)
            for vector, numbers in zip(answer.vectors, expected):
                assert list(vector.values) == pytest.approx(numbers, rel=1e-6)
            assert answer.usage.prompt_tokens == over_http["usage"]["prompt_tokens"]

    serving(scenario, **pooling())


def test_scores(serving):
    async def scenario(server):
        answer = await server.stub.Score(pb.ScoreRequest(queries=TEXTS[:1], documents=TEXTS))
        body = {"queries": TEXTS[0], "documents": TEXTS}
        over_http = await Client(create_app(server.service)).post("/score", body)
        return list(answer.scores), [each["score"] for each in over_http.json["data"]]

    scores, expected = serving(scenario, **pooling())
    assert scores == pytest.approx(expected, rel=1e-6)
    assert scores[0] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.EmbedRequest(), "inputs"),
        (pb.EmbedRequest(inputs=[pb.Input()]), "inputs[0]"),
        (pb.EmbedRequest(inputs=[pb.Input(text="a")], dimensions=3), "dimensions"),
    ],
)
def test_a_wrong_input_is_named(serving, request_, field):
    async def scenario(server):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(request_)
        return caught.value

    error = serving(scenario, **pooling())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.details()
