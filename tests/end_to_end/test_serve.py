"""`jaxpaged serve` as people start it: the embedded model, a client, and a signal."""

import json
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from jaxpaged.errors import is_installed
from tests.end_to_end.conftest import SERVE, started, stop

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")
pytest.importorskip("jaxpaged.engine.async_llm", reason="serving needs AsyncLLM")

ROOT = Path(__file__).parents[2]
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OF_ENGINE = {"model_name"}
HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
)
VLLM_DASHBOARD = {
    **{f"vllm:{name}_bucket": {"le", *OF_ENGINE} for name in HISTOGRAMS},
    **{f"vllm:{name}_{suffix}": OF_ENGINE for name in HISTOGRAMS for suffix in ("sum", "count")},
    **{f"vllm:{name}": OF_ENGINE for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")},
    "vllm:prompt_tokens_total": OF_ENGINE,
    "vllm:generation_tokens_total": OF_ENGINE,
    "vllm:request_success_total": {"finished_reason", *OF_ENGINE},
}
"""Samples, and their labels, that the dashboard which vLLM ships with asks for."""
QUESTION = [{"role": "user", "content": "What is the capital of Portugal?"}]


@pytest.fixture(scope="module")
def collector():
    """Where the server sends its traces; None without the libraries for that."""
    if not is_installed("opentelemetry.sdk"):
        yield None
        return
    from tests.engine.collector import http_collector

    with http_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def served(collector):
    """The process, and its addresses of HTTP and of gRPC."""
    tracing = ["--otlp-traces-endpoint", collector.endpoint] if collector else []
    command = [*SERVE, "--grpc-port", "0", "--kv-offload", "host=16M", *tracing]
    process, addresses = started(*command, pattern=r"is served at (\S+) and over gRPC at (\S+) ")
    yield process, addresses
    stop(process)


@pytest.fixture(scope="module")
def addresses(served):
    return served[1]


@pytest.fixture(scope="module")
def process(served):
    return served[0]


@pytest.fixture(scope="module")
def client(addresses):
    return openai.OpenAI(base_url=f"{addresses[0]}/v1", api_key="none", max_retries=0, timeout=120)


def test_the_embedded_model_answers_over_http(client):
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert "Lisbon" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(client):
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content for chunk in stream)
    assert text == whole.choices[0].message.content


def test_what_is_wrong_with_a_request_is_told_by_the_engine_too(client):
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="demo", prompt=[300] * 5000)
    shape = {"regex": "a{1000000}"}  # compiles, and is too much for the vocabulary
    with pytest.raises(openai.BadRequestError, match="structured_outputs cannot be used: lexer error"):
        client.chat.completions.create(model="demo", messages=QUESTION, extra_body={"structured_outputs": shape})


def test_answers_have_the_shape_and_the_calls_that_were_asked_for(client):
    """The model's own text is held to a schema by the engine's grammar, at once, as a stream, and as a call."""
    properties = {"city": {"enum": ["Lisbon", "Rome"]}, "sunny": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["city", "sunny"], "additionalProperties": False}
    asked = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 80}
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    whole = client.chat.completions.create(**asked, response_format=shape).choices[0]
    answer = json.loads(whole.message.content)
    assert list(answer) == ["city", "sunny"] and answer["city"] in ("Lisbon", "Rome") and whole.finish_reason == "stop"
    stream = client.chat.completions.create(**asked, response_format=shape, stream=True)
    assert "".join(chunk.choices[0].delta.content for chunk in stream) == whole.message.content
    tools = [{"type": "function", "function": {"name": "travel", "parameters": schema}}]
    called = client.chat.completions.create(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    [call] = called.message.tool_calls
    assert called.finish_reason == "tool_calls" and call.function.name == "travel"
    assert json.loads(call.function.arguments)["city"] in ("Lisbon", "Rome")


def test_ready_means_that_every_program_of_ordinary_requests_is_compiled(client):
    url = str(client.base_url).removesuffix("/v1/")
    while True:
        status, said = ask(f"{url}/ready")
        gauges = {line.partition("{")[0]: line.split()[-1] for line in ask(f"{url}/metrics")[1].splitlines()}
        compiled, needed = (gauges[f"jaxpaged:ordinary_programs{suffix}"] for suffix in ("_ready", ""))
        if status == 200:
            break
        assert ask(f"{url}/health")[0] == 200
        assert "programs that ordinary requests need are compiled" in said
        time.sleep(0.1)
    assert compiled == needed and float(needed) > 5


def test_the_dashboard_the_alerts_and_those_of_vllm_find_what_they_ask_for(client, addresses):
    for name in ("opentelemetry.sdk", "promql_parser"):
        pytest.importorskip(name, reason="comes with the extra test")
    from jaxpaged.client import Client
    from jaxpaged.entrypoints.http.metric_help import HELP
    from tests.configs.queries import exposed, problems

    client.completions.create(model="demo", prompt="Once", max_tokens=2)
    with Client(addresses[1]) as over_grpc:
        assert over_grpc.answer("Once", max_tokens=2).text
    text = ask(f"{addresses[0]}/metrics")[1]
    assert problems(text) == []
    there = exposed(text)
    assert {name for name, labels in VLLM_DASHBOARD.items() if not labels <= there.get(name, set())} == set()
    told = set(re.findall(r"^# HELP (\S+)", text, re.M))
    assert told == set(re.findall(r"^# TYPE (\S+)", text, re.M)), "a metric without a line in metric_help.py"
    assert {name.removesuffix("_total") for name in told} <= {name.removesuffix("_total") for name in HELP}


def test_requests_are_traced_from_one_process_to_the_other(client, collector):
    pytest.importorskip("opentelemetry.sdk", reason="comes with the extra test")
    client.completions.create(model="demo", prompt="Once", max_tokens=2, extra_headers={"traceparent": TRACEPARENT})
    while not (found := [span for span in collector.spans if span.parent_id == TRACEPARENT.split("-")[2]]):
        time.sleep(0.1)
    assert list(collector.below(found[0])) == ["queue", "prefill", "decode"]


def ask(url):
    """(status, text)"""
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_server_stops_when_it_is_told_to(client, process):
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
