"""Servers of models that pool, asked over real sockets: each endpoint gives what `LLM` gives of the same model.

An embedding model and a classifier serve all of them between the two.
"""

import asyncio
import base64
import json
import sys
import threading
import urllib.request

import numpy as np
import pytest

from jaxpaged import LLM, AsyncLLM, PoolingParams
from jaxpaged.config import EngineConfig
from jaxpaged.errors import RequestError
from tests.end_to_end.conftest import started, stop
from tests.models.pooling_checkpoints import write

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")
pytest.importorskip("grpc", reason="comes with the extra test")

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "max_model_len": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 64,
}
SERVE = (
    sys.executable,
    "-m",
    "jaxpaged",
    "serve",
    "--port",
    "0",
    "--grpc-port",
    "0",
    "--served-model-name",
    "pools",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "16",
    "--token-buckets",
    "16",
    "--max-model-len",
    "64",
    "--block-size",
    "8",
    "--num-gpu-blocks-override",
    "64",
)
QUERY = "w5 w6 w7"
DOCUMENTS = ["w9 w10 w11 w12", "w5 w6 w7", "w30 w31"]
TEXTS = [QUERY, *DOCUMENTS]
PAIRS = ({"text_1": QUERY, "text_2": DOCUMENTS}, {"queries": QUERY, "documents": DOCUMENTS})


class Served:
    """A server of one checkpoint, its clients, and what the same model gives offline."""

    def __init__(self, name, folder):
        from jaxpaged.client import Client

        model = str(write(name, folder))
        with LLM(model, **OPTIONS) as llm:
            self.vectors = [each.outputs.data for each in llm.encode(TEXTS, use_tqdm=False)]
            self.scores = [each.outputs.score for each in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        self.process, [url, grpc_address] = started(
            *SERVE, model, pattern=r"served at (http://\S+) .*over gRPC at (\S+)"
        )
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.url = url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)
        self.grpc = Client(grpc_address)

    def ask(self, path, **body):
        data = json.dumps({"model": "pools", **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)


def serving(name):
    @pytest.fixture(scope="module")
    def server(tmp_path_factory):
        served = Served(name, tmp_path_factory.mktemp(name))
        yield served
        served.grpc.close()
        stop(served.process)

    return server


embedder, classifier = serving("llama_embed"), serving("llama_score")


def near(expected):
    return pytest.approx(np.array(expected), rel=1e-4, abs=1e-5)


def test_openais_client_embeds_texts_and_tokens_as_numbers_and_in_base64(embedder):
    create = embedder.openai.embeddings.create
    for given, vectors in ((TEXTS, embedder.vectors), (QUERY, embedder.vectors[:1]), ([5, 6, 7], embedder.vectors[:1])):
        for form in ("float", "base64"):
            answer = create(model="pools", input=given, encoding_format=form)
            found = [each.embedding for each in answer.data]
            if form == "base64":
                found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
            assert np.array(found) == near(vectors)
            assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    short = create(model="pools", input=QUERY, dimensions=8).data[0].embedding
    assert len(short) == 8 and np.linalg.norm(short) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        create(model="pools", input=QUERY, dimensions=10_000)
    with pytest.raises(openai.BadRequestError, match="was started for pooling"):
        embedder.openai.completions.create(model="pools", prompt=QUERY)


def test_whatever_a_model_gives_is_pooled(embedder, classifier):
    for server in (embedder, classifier):
        answer = server.ask("/pooling", input=TEXTS)
        assert np.array([each["data"] for each in answer["data"]]) == near(server.vectors)


def test_a_classifier_classifies(classifier):
    answer = classifier.ask("/classify", input=TEXTS)
    assert np.array([each["probs"] for each in answer["data"]]) == near(classifier.vectors)
    assert {each["label"] for each in answer["data"]} == {"fits"}


@pytest.mark.parametrize("kind", ["embedder", "classifier"])
def test_pairs_are_scored_and_documents_ranked_under_all_names(kind, request):
    server = request.getfixturevalue(kind)
    for path in ("/score", "/v1/score"):
        for pairs in PAIRS:
            assert [each["score"] for each in server.ask(path, **pairs)["data"]] == near(server.scores)
    for path in ("/rerank", "/v1/rerank"):
        results = server.ask(path, query=QUERY, documents=DOCUMENTS, top_n=2)["results"]
        best = sorted(range(3), key=lambda i: -server.scores[i])[:2]
        assert [each["index"] for each in results] == best
        assert [each["relevance_score"] for each in results] == near([server.scores[i] for i in best])


@pytest.mark.parametrize("kind", ["embedder", "classifier"])
def test_grpc_gives_the_same(kind, request):
    server = request.getfixturevalue(kind)
    assert list(server.grpc.score([QUERY], DOCUMENTS).scores) == near(server.scores)
    if kind == "embedder":
        answer = server.grpc.embed(TEXTS)
        assert np.array([each.values for each in answer.vectors]) == near(server.vectors)


def test_async_llm_encodes(tmp_path):
    config = EngineConfig.from_options(model=str(write("llama_embed", tmp_path)), **OPTIONS)
    llm = AsyncLLM.from_config(config)

    async def encode(prompt, number, **params):
        [output] = [each async for each in llm.encode(prompt, PoolingParams(**params), f"r{number}")]
        assert output.error is None and output.finished and output.request_id == f"r{number}"
        return output.outputs.data

    async def main():
        vectors = await asyncio.gather(*(encode(text, i) for i, text in enumerate([*TEXTS, QUERY])))
        raw = await encode(QUERY, "raw", use_activation=False)
        with pytest.raises(RequestError, match="dimensions"):
            await encode(QUERY, "wide", dimensions=10_000)
        return vectors, raw

    try:
        vectors, raw = asyncio.run(main())
    finally:
        llm.shutdown()
    assert [np.linalg.norm(vector) for vector in vectors] == near(np.ones(5))
    assert vectors[0] == near(vectors[-1]) and vectors[0] != near(vectors[1])
    assert raw / np.linalg.norm(raw) == near(vectors[0])
