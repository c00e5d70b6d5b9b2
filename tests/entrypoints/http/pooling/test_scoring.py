"""`/score` and `/rerank` over an engine whose model counts tokens."""

import numpy as np
import pytest

from jaxpaged.engine.pooling.pooler import Pooler
from tests.engine.fake_pooling import CLASSES, vector_of
from tests.engine.small_tokenizer import make_tokenizer

ENCODE = make_tokenizer().encode
CROSS = Pooler("classify", 1, "sigmoid", labels=("fits",))
QUERY, DOCUMENTS = "the cat", ["a small bird", "the cat sat", "the sun"]


def cosine(a, b):
    a, b = vector_of(ENCODE(a)), vector_of(ENCODE(b))
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def scores(answer):
    assert answer.status == 200, answer.body
    return [each["score"] for each in answer.json["data"]]


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_an_embedding_model_gives_the_cosine_under_every_name(ask_pooling, names):
    first, second = names
    answer = ask_pooling("/score", {first: QUERY, second: DOCUMENTS})
    assert scores(answer) == pytest.approx([cosine(QUERY, each) for each in DOCUMENTS], rel=1e-5)
    assert [each["index"] for each in answer.json["data"]] == [0, 1, 2]
    assert answer.json["usage"]["prompt_tokens"] == sum(len(ENCODE(text)) for text in [QUERY, *DOCUMENTS])


def test_texts_are_compared_one_by_one(ask_pooling):
    answer = ask_pooling("/v1/score", {"text_1": DOCUMENTS, "text_2": [QUERY, "the cat sat", "a dog"]})
    pairs = zip(DOCUMENTS, [QUERY, "the cat sat", "a dog"])
    assert scores(answer) == pytest.approx([cosine(*pair) for pair in pairs], rel=1e-5)


def test_a_classifier_reads_the_pair(ask_pooling):
    answer = ask_pooling("/score", {"text_1": QUERY, "text_2": DOCUMENTS}, pooler=CROSS)
    lengths = [len(ENCODE(QUERY, False)) + len(ENCODE(each, False)) for each in DOCUMENTS]
    counted = answer.json["usage"]["prompt_tokens"]
    special = (counted - sum(lengths)) / len(DOCUMENTS)
    assert scores(answer) == pytest.approx([1 / (1 + np.exp(0.5 * (n + special))) for n in lengths], rel=1e-5)
    raw = ask_pooling("/score", {"text_1": QUERY, "text_2": DOCUMENTS, "use_activation": False}, pooler=CROSS)
    assert scores(raw) == pytest.approx([-0.5 * (n + special) for n in lengths])


def test_documents_come_in_order_of_relevance(ask_pooling):
    for path in ("/rerank", "/v1/rerank"):
        answer = ask_pooling(path, {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]})
        results = answer.json["results"]
        found = [each["relevance_score"] for each in results]
        assert found == sorted(found, reverse=True)
        for each in results:
            assert each["document"]["text"] == DOCUMENTS[each["index"]]
            assert each["relevance_score"] == pytest.approx(cosine(QUERY, DOCUMENTS[each["index"]]), rel=1e-5)
        assert {each["index"] for each in results} == {0, 1, 2} and answer.json["id"].startswith("rerank-")
    best = ask_pooling("/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False})
    assert best.json["results"] == [{"index": results[0]["index"], "relevance_score": found[0]}]


@pytest.mark.parametrize(
    ("path", "body", "parameter"),
    [
        ("/score", {"text_1": "a"}, "text_1"),
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a", "documents": "b"}, "documents"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ("/score", {"text_1": [], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "", "text_2": ["c"]}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "be kind"}, "instruction"),
        ("/rerank", {"documents": ["b"]}, "query"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(ask_pooling, path, body, parameter):
    answer = ask_pooling(path, body)
    assert answer.status == 400 and answer.error["param"] == parameter, answer.body


def test_a_classifier_of_many_labels_has_no_score(ask_pooling):
    answer = ask_pooling("/score", {"text_1": "a", "text_2": "b"}, pooler=CLASSES)
    assert answer.status == 400 and "3 labels" in answer.error["message"]


def test_a_pair_that_is_too_long_is_refused_or_cut(ask_pooling):
    long = "the cat sat on the mat " * 20
    body = {"query": "the cat", "documents": [long]}
    assert ask_pooling("/rerank", body, pooler=CROSS, max_model_len=32).status == 400
    answer = ask_pooling("/rerank", {**body, "truncate_prompt_tokens": -1}, pooler=CROSS, max_model_len=32)
    assert answer.status == 200 and answer.json["usage"]["prompt_tokens"] == 32
