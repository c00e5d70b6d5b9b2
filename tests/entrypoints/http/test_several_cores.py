"""A server before several engine cores: the header that names one, and the metrics of each."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.entrypoints.http.app import create_app
from jaxpaged.serving.options import ServerOptions
from jaxpaged.serving.service import ServedModel, Service
from tests.engine.fake_core import llm_in_thread
from tests.engine.test_core_client import both_ready
from tests.entrypoints.http.asgi_client import Client

PROMPT = {"prompt": [7, 8, 9], "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm():
    with llm_in_thread(data_parallel_size=2, max_num_seqs=64, max_model_len=4096) as llm:
        yield llm


def asked(llm, scenario):
    """What `scenario` gives, which has a client of the server."""

    async def main():
        await both_ready(llm)
        return await scenario(Client(create_app(Service(llm, ServedModel(("fake",), 4096, 64), ServerOptions()))))

    return asyncio.run(main())


def sums(text, name):
    """Of each core, by its number."""
    family = next(each for each in text_string_to_metric_families(text) if each.name == name)
    found = {}
    for sample in family.samples:
        found[sample.labels["engine"]] = found.get(sample.labels["engine"], 0) + sample.value
    return found


def test_the_header_names_the_core_and_every_core_has_its_series(llm):
    async def scenario(client):
        for core in (1, 1, 0, 1):
            answer = await client.post("/v1/completions", PROMPT, x_data_parallel_rank=str(core))
            assert answer.status == 200
        text = (await client.get("/metrics")).body.decode()
        assert (await client.get("/ready")).status == (await client.get("/health")).status == 200
        return text, (await client.get("/engine/state")).json

    text, state = asked(llm, scenario)
    assert sums(text, "vllm:generation_tokens") == {"0": 4, "1": 12}
    assert set(sums(text, "vllm:cache_config_info")) <= {"0", "1"}
    assert state["counts"]["generation_tokens"] == 16 and state["finished"]["length"] == 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
@pytest.mark.parametrize(
    ("value", "said"), [("2", "has 2 cores: 0 to 1"), ("one", "must be the number"), ("-1", "must")]
)
def test_a_core_that_is_none_is_refused(llm, path, value, said):
    body = PROMPT if path == "/v1/completions" else {"input": "hello"}
    answer = asked(llm, lambda client: client.post(path, body, x_data_parallel_rank=value))
    assert answer.status == 400 and said in answer.json["error"]["message"]
