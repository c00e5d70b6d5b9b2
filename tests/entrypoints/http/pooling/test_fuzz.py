"""Bodies that fit the endpoints or nearly do: each is served, or refused by the name of a field."""

import asyncio

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.entrypoints.http.pooling.protocol import EmbeddingRequest, RerankRequest, ScoreRequest
from tests.engine.fake_pooling import EMBEDS, FakePoolingExecutor
from tests.entrypoints.http.asgi_client import Client
from tests.entrypoints.http.live_server import make_service

BODIES = {
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/score": (ScoreRequest, {"text_1": "a", "text_2": ["b", "c"]}),
    "/rerank": (RerankRequest, {"query": "a", "documents": ["b", "c"]}),
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
NUMBERS = st.integers(-3, 70) | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30]) | st.floats(-3, 3)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.sampled_from(["left", "base64", "float32"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("text"), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_field_holds_is_served_or_refused_by_its_name(path):
    kind, valid = BODIES[path]
    fields = st.sampled_from([field.name for field in msgspec.structs.fields(kind)])

    @hypothesis.settings(max_examples=100)
    @hypothesis.given(st.dictionaries(fields, JSON, min_size=1, max_size=2))
    def one_request(client, change):
        answer = loop.run(client.post(path, {**valid, **change}))
        assert answer.status in (200, 400, 404), answer.body
        if answer.status != 200:
            assert answer.error["param"] is not None, answer.body

    with asyncio.Runner() as loop:
        service = make_service(executor=FakePoolingExecutor(), pooler=EMBEDS, runner="pooling")
        one_request(Client(create_app(service)))
        assert len(service.traffic) == 0
