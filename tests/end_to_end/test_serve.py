"""`jaxpaged serve` as people start it: the embedded model, a client, and a signal."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")
pytest.importorskip("jaxpaged.engine.async_llm", reason="serving needs AsyncLLM")

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of Portugal?"}]


@pytest.fixture(scope="module")
def process():
    command = [sys.executable, "-m", "jaxpaged", "serve", "--port", "0", "--max-num-seqs", "8"]
    started = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
    )
    yield started
    started.kill()
    started.communicate()


@pytest.fixture(scope="module")
def client(process):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "http://" in line:
            url = "http://" + line.partition("http://")[2].split()[0]
            return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    raise AssertionError("".join(lines))


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
    schema = {
        "type": "object", "properties": properties, "required": ["city", "sunny"], "additionalProperties": False
    }  # fmt: skip
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
