"""`/v1/embeddings`, `/pooling` and `/classify` over an engine whose model counts tokens."""

import base64

import numpy as np
import openai
import pytest

from jaxpaged.engine.pooling.pooler import Pooler
from tests.engine.fake_pooling import CLASSES, EMBEDS, normalized, vector_of
from tests.engine.small_tokenizer import make_tokenizer

ENCODE = make_tokenizer().encode
CUTTABLE = Pooler("embed", 8, "normalize", dimensions=(2, 4))


def expected(text):
    return normalized(vector_of(ENCODE(text)))


def embeddings(answer):
    assert answer.status == 200, answer.body
    return [each["embedding"] for each in answer.json["data"]]


def test_texts_and_ids_alone_and_in_lists_are_embedded(ask_pooling):
    ids = ENCODE("the cat")
    for given, count in [("the cat", 1), (["the cat"], 1), (ids, 1), ([ids, ids], 2), (["the cat", "a dog"], 2)]:
        answer = ask_pooling("/v1/embeddings", {"model": "fake", "input": given})
        assert [each["index"] for each in answer.json["data"]] == list(range(count))
        np.testing.assert_allclose(embeddings(answer)[0], expected("the cat"), rtol=1e-6)
    assert answer.json["object"] == "list" and answer.json["id"].startswith("embd-")
    assert answer.json["data"][1]["object"] == "embedding"
    count = len(ids) + len(ENCODE("a dog"))
    assert answer.json["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def test_base64_holds_the_same_numbers(ask_pooling):
    [text] = embeddings(ask_pooling("/v1/embeddings", {"input": "the cat", "encoding_format": "base64"}))
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(text), "<f4"), expected("the cat"), rtol=1e-6)


def test_an_embedding_may_be_cut_or_left_as_it_is(ask_pooling):
    raw = vector_of(ENCODE("the cat"))
    [cut] = embeddings(ask_pooling("/v1/embeddings", {"input": "the cat", "dimensions": 4}, pooler=CUTTABLE))
    np.testing.assert_allclose(cut, normalized(raw[:4]), rtol=1e-6)
    [plain] = embeddings(ask_pooling("/v1/embeddings", {"input": "the cat", "normalize": False}))
    assert plain == raw.tolist()


def test_a_long_text_is_cut_only_on_request(ask_pooling):
    text = "the cat sat on the mat " * 20
    refused = ask_pooling("/v1/embeddings", {"input": text}, max_model_len=32)
    assert refused.status == 400 and refused.error["param"] == "input"
    assert "max_model_len = 32" in refused.error["message"]
    ids = ENCODE(text)[:32]
    answer = ask_pooling("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1}, max_model_len=32)
    np.testing.assert_allclose(embeddings(answer)[0], normalized(vector_of(ids)), rtol=1e-6)
    assert answer.json["usage"]["prompt_tokens"] == 32


def test_pooling_gives_what_the_model_gives(ask_pooling):
    answer = ask_pooling("/pooling", {"input": ["the cat"]})
    assert answer.json["data"][0]["object"] == "pooling"
    np.testing.assert_allclose(answer.json["data"][0]["data"], expected("the cat"), rtol=1e-6)
    probs = ask_pooling("/pooling", {"input": "the cat"}, pooler=CLASSES).json["data"][0]["data"]
    assert sum(probs) == pytest.approx(1) and len(probs) == 3


@pytest.mark.parametrize(("pooler", "task"), [(EMBEDS, "embed"), (CLASSES, "classify")])
def test_pooling_takes_the_task_that_it_does_and_refuses_others(ask_pooling, pooler, task):
    plain, named = (ask_pooling("/pooling", {"input": "a", **more}, pooler=pooler) for more in ({}, {"task": task}))
    assert plain.json["data"] == named.json["data"]
    refused = ask_pooling("/pooling", {"input": "a", "task": "token_embed"}, pooler=pooler)
    assert refused.status == 400 and refused.error["param"] == "task" and "'token_embed'" in refused.error["message"]


def test_the_most_likely_class_has_its_name(ask_pooling):
    [item] = ask_pooling("/classify", {"input": [[4, 7, 5]]}, pooler=CLASSES).json["data"]
    assert item["label"] == "yes" and item["num_classes"] == 3 and np.argmax(item["probs"]) == 1
    assert sum(item["probs"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[299999]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 4}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1000}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"use_activation": True, "normalize": False}, "normalize"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"embed_dtype": "bfloat16"}, "embed_dtype"),
        ({"endianness": "big"}, "endianness"),
        ({"priority": 3}, "priority"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(ask_pooling, change, parameter):
    answer = ask_pooling("/v1/embeddings", {"input": "the cat", **change})
    assert answer.status == 400 and answer.error["param"] == parameter, answer.body


def test_another_models_name_is_not_known(ask_pooling):
    assert ask_pooling("/v1/embeddings", {"input": "a", "model": "other"}).status == 404


BODIES = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_model_that_generates_says_that_it_does_not_pool(ask, path):
    answer = ask(path, BODIES[path])
    assert answer.status == 400 and "was started to generate" in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_model_that_pools_says_that_it_does_not_generate(ask_pooling, path, body):
    answer = ask_pooling(path, body)
    assert answer.status == 400 and "was started for pooling" in answer.error["message"]


def test_a_model_started_for_the_other_kind_of_pooling_says_so(ask_pooling):
    assert "to classify, not to embed" in ask_pooling("/v1/embeddings", {"input": "a"}, pooler=CLASSES).error["message"]
    assert "to embed, not to classify" in ask_pooling("/classify", {"input": "a"}).error["message"]
    assert ask_pooling("/v1/models").json["data"][0]["id"] == "fake"


def test_a_prompt_that_fails_ends_the_request(serving):
    async def scenario(server):
        server.engine.executor.fail_at[0] = "result"
        failed = await server.client.post("/v1/embeddings", {"input": ["the cat", "a dog"]})
        return failed, await server.client.post("/v1/embeddings", {"input": ["the cat", "a dog"]})

    failed, after = serving(scenario, **pooling_options(EMBEDS))
    assert failed.status == 500 and after.status == 200


def test_a_client_that_leaves_ends_its_request(serving):
    async def scenario(server):
        server.engine.go_on.clear()
        answer = await server.client.post("/v1/embeddings", {"input": ["the cat", "a dog"]}, leave_after=0)
        return answer.status, len(server.engine.aborted), len(server.service.traffic)

    assert serving(scenario, **pooling_options(EMBEDS)) == (499, 2, 0)


def test_the_openai_client_gets_floats_and_base64():
    from tests.entrypoints.http.live_server import live_server

    with live_server(**pooling_options(EMBEDS)) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        default = client.embeddings.create(model="fake", input=["the cat", "a dog"])
        floats = client.embeddings.create(model="fake", input=["the cat", "a dog"], encoding_format="float")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="fake", input="the cat", dimensions=4)
    for answer in (default, floats):
        for each, text in zip(answer.data, ["the cat", "a dog"]):
            np.testing.assert_allclose(each.embedding, expected(text), rtol=1e-6)
    assert default.usage.total_tokens == len(ENCODE("the cat")) + len(ENCODE("a dog"))


def pooling_options(pooler):
    from tests.engine.fake_pooling import FakePoolingExecutor

    return {"executor": FakePoolingExecutor(pooler.width), "pooler": pooler, "runner": "pooling"}
