"""Paths under which other servers are known: `/invocations`, `/v2/rerank`, `/kv_event_sources`."""

import dataclasses

import pytest

from tests.engine.fake_pooling import CLASSES, EMBEDS, FakePoolingExecutor

MESSAGES = [{"role": "user", "content": "the cat"}]
POOLED = {"pooling": EMBEDS, "classify": CLASSES}


def pooling(kind):
    pools = POOLED[kind]
    return {"executor": FakePoolingExecutor(pools.width), "pooler": pools, "runner": "pooling"}


def without_id(answer):
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        (None, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "temperature": 0}),
        (None, "/v1/completions", {"prompt": "the cat", "max_tokens": 3, "temperature": 0}),
        ("pooling", "/v1/embeddings", {"input": ["the cat", "a"]}),
        ("classify", "/classify", {"input": "the cat"}),
        ("pooling", "/score", {"text_1": "the cat", "text_2": ["a", "sat"]}),
        ("pooling", "/score", {"queries": "the cat", "documents": ["a", "sat"]}),
        ("pooling", "/rerank", {"query": "the cat", "documents": ["a", "sat"]}),
    ],
)
def test_invocations_answer_what_the_body_is_about(serving, kind, path, body):
    async def scenario(server):
        return [await server.client.post(each, body) for each in (path, "/invocations")]

    own, same = serving(scenario, **(pooling(kind) if kind else {}))
    assert own.status == 200 and without_id(own.json) == without_id(same.json)


def test_invocations_stream(ask):
    answer = ask("/invocations", {"prompt": "the cat", "max_tokens": 3, "stream": True})
    assert answer.events[-1] == "[DONE]" and len(answer.events) > 1


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({}, 400, "prompt"),
        ({"input": "a"}, 400, "messages"),
        (b"[]", 400, "object"),
        (b"{", 400, "JSON"),
        ({"prompt": "a", "temperature": 5}, 400, "temperature"),
        ({"prompt": "a", "model": "other"}, 404, "other"),
        ({"prompt": "a", "lora_request": {"a": 1}}, 400, "lora_request"),
    ],
)
def test_invocations_refuse_what_the_endpoints_refuse(ask, body, status, word):
    answer = ask("/invocations", body)
    assert answer.status == status and word in answer.error["message"]


def test_a_pooling_model_is_not_asked_to_generate(ask):
    answer = ask("/invocations", {"messages": MESSAGES}, **pooling("pooling"))
    assert answer.status == 400 and "input" in answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_under_every_version(serving, path):
    body = {"query": "the cat", "documents": ["a", "the cat", "sat"], "top_n": 2}

    async def scenario(server):
        return [await server.client.post(each, body) for each in ("/rerank", path)]

    own, same = serving(scenario, **pooling("pooling"))
    assert own.status == 200 and without_id(own.json) == without_id(same.json)


EVENTS = {"enable_kv_cache_events": True, "topic": "kv"}


@pytest.mark.parametrize(
    ("config", "size", "sources"),
    [
        ({}, 1, []),
        ({"enable_kv_cache_events": False}, 1, []),
        ({**EVENTS, "publisher": "null"}, 1, []),
        (EVENTS, 1, [(0, "tcp://127.0.0.1:5557", None)]),
        (
            {**EVENTS, "endpoint": "tcp://127.0.0.1:6000", "replay_endpoint": "ipc:///tmp/replay"},
            2,
            [(0, "tcp://127.0.0.1:6000", "ipc:///tmp/replay"), (1, "tcp://127.0.0.1:6001", "ipc:///tmp/replay_dp1")],
        ),
    ],
)
def test_routers_are_told_where_kv_events_are_published(serving, config, size, sources):
    async def scenario(server):
        whole = server.engine.config
        server.engine.config = dataclasses.replace(
            whole,
            cache=dataclasses.replace(whole.cache, kv_events_config=config),
            parallel=dataclasses.replace(whole.parallel, data_parallel_size=size),
        )
        return await server.client.get("/kv_event_sources")

    answer = serving(scenario)
    names = ("data_parallel_rank", "endpoint", "replay_endpoint")
    expected = [{**dict(zip(names, each, strict=True)), "topic": "kv"} for each in sources]
    assert answer.status == 200 and answer.json == {"kv_event_sources": expected}
