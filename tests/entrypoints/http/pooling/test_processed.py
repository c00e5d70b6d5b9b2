"""`/pooling` with `data`, over an engine whose model counts tokens and an I/O processor that counts words."""

import pytest

from jaxpaged.engine.pooling.io_processor import IOProcessing
from tests.engine.small_tokenizer import make_tokenizer


class Words:
    def parse_data(self, data):
        if not isinstance(data, dict) or not isinstance(data.get("words"), list):
            raise ValueError("it has no words")
        return data

    def pre_process(self, prompt, request_id=None):
        if prompt.get("breaks"):
            raise KeyError("a bug in /root/secret/file.py")
        return [{"prompt": word} for word in prompt["words"]]

    def post_process(self, model_output, request_id=None):
        lengths = [len(output.prompt_token_ids) for output in model_output]
        return {"lengths": lengths, "id": request_id} if len(lengths) < 3 else object()


@pytest.fixture
def pool(ask_pooling):
    def ask(body, processor=Words):
        given = IOProcessing("words", processor()) if processor else None
        return ask_pooling("/pooling", {"model": "fake", **body}, io_processor=given)

    return ask


def test_data_is_answered_by_the_processor(pool):
    answer = pool({"data": {"words": ["the cat", "a"]}})
    assert answer.status == 200, answer.body
    assert answer.json["request_id"].startswith("pool-") and answer.json["created_at"] > 0
    lengths = [len(make_tokenizer().encode(text)) for text in ("the cat", "a")]
    assert answer.json["data"] == {"lengths": lengths, "id": answer.json["request_id"]}
    assert pool({"data": {"words": ["a"]}, "task": "plugin", "request_id": "mine"}).json["request_id"] == "pool-mine"
    assert len(pool({"input": "the cat"}).json["data"]) == 1


@pytest.mark.parametrize(
    ("body", "words", "parameter"),
    [
        ({"data": [1]}, "data: it has no words", "data"),
        ({"data": {"words": []}}, "", None),
        ({"task": "plugin"}, "data is not given", "data"),
        ({"data": {"words": ["a"]}, "input": "a"}, "input and data are given", "input"),
        ({"data": {"words": ["a"]}, "dimensions": 2}, "dimensions and data are given", "dimensions"),
        ({"data": {"words": [""]}}, "data has an empty text", "data"),
        ({"data": {"words": ["a"] * 2049}}, "data has 2049 entries", "data"),
        ({"data": {"words": ["a"]}, "task": "classify"}, "task is 'classify'", "task"),
    ],
)
def test_what_cannot_be_is_refused(pool, body, words, parameter):
    answer = pool(body)
    assert answer.status == (400 if words else 500)
    assert words in answer.json["error"]["message"]
    assert parameter is None or answer.json["error"]["param"] == parameter


def test_without_a_processor_data_is_refused(pool):
    answer = pool({"data": {"words": ["a"]}}, processor=None)
    assert answer.status == 400 and "Start it with io_processor_plugin" in answer.json["error"]["message"]


def test_one_that_fails_fails_its_request_and_says_nothing_of_itself(pool):
    answer = pool({"data": {"words": ["a"], "breaks": True}})
    assert answer.status == 500 and "the I/O processor words failed" in answer.json["error"]["message"]
    assert "secret" not in answer.body.decode()
    answer = pool({"data": {"words": ["a"] * 3}})  # an answer that JSON cannot say
    assert answer.status == 500 and "the I/O processor words failed" in answer.json["error"]["message"]
