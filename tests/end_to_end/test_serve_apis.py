"""One `jaxpaged serve` with the embedded model, asked by Anthropic's and OpenAI's own clients, killed, and stopped.

The tests run in order: the last ones end the engine's process and then the server.
"""

import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SERVE

openai = pytest.importorskip("openai", reason="comes with the extra test")
anthropic = pytest.importorskip("anthropic", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUESTION = "What is the capital of Portugal?"
ANSWER = "Lisbon"
GREEDY = {"temperature": 0}
ASK = {"model": "demo", "max_tokens": 60, "messages": [{"role": "user", "content": QUESTION}], "extra_body": GREEDY}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}


class Running:
    """The server, and clients of it."""

    def __init__(self, process):
        self.process = process
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        assert lines and "http://" in lines[-1], "".join(lines)
        self.url = "http://" + lines[-1].partition("http://")[2].split()[0]
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=300)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key="any", max_retries=0, timeout=300)
        self.said = []  # by the server since; reading it keeps its pipe from filling up
        threading.Thread(target=lambda: self.said.extend(process.stderr), daemon=True).start()

    def status(self, path):
        try:
            return urllib.request.urlopen(self.url + path, timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code

    def engine_pid(self):
        listed = subprocess.run(["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True)
        [pid] = [line.split()[0] for line in listed.stdout.decode().splitlines() if "core_process" in line]
        return int(pid)


@pytest.fixture(scope="module")
def server():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(SERVE, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    yield Running(process)
    process.kill()
    process.wait()


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


# ---- Anthropic's API


def test_a_message_is_answered_at_once_and_as_a_stream(server):
    message = server.anthropic.messages.create(**ASK)
    [block] = message.content
    assert ANSWER in block.text and message.stop_reason == "end_turn"
    with server.anthropic.messages.stream(**ASK) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == block.text and len(pieces) > 1
    assert final.usage.output_tokens == message.usage.output_tokens


def test_tokens_are_counted_as_they_are_used(server):
    counted = server.anthropic.messages.count_tokens(model="demo", messages=ASK["messages"], system="Be brief.")
    used = server.anthropic.messages.create(**ASK, system="Be brief.").usage.input_tokens
    assert counted.input_tokens == used


def test_a_forced_tool_is_called_at_once_and_as_a_stream(server):
    options = {"tools": [{"name": "travel", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "travel"}}
    message = server.anthropic.messages.create(**ASK, **options)
    with server.anthropic.messages.stream(**ASK, **options) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        [call] = each.content
        assert (call.type, call.name, each.stop_reason) == ("tool_use", "travel", "tool_use")
        assert call.input["city"] in ("Lisbon", "Rome")


def test_a_stop_sequence_ends_a_message(server):
    message = server.anthropic.messages.create(**ASK, stop_sequences=["Portugal"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Portugal")
    assert "Portugal" not in message.content[0].text


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"allowed_token_ids": [300], "bad_words": ["user"]}, ("allowed_token_ids", "bad_words")),
        ({"allowed_token_ids": [300], "bad_words": ["useruser"]}, ("allowed_token_ids", "bad_words")),
        (
            {"allowed_token_ids": [300], "structured_outputs": {"regex": "[0-9]+"}},
            ("structured_outputs", "allowed_token_ids"),
        ),
        ({"allowed_token_ids": [300], "min_tokens": 3, "stop_token_ids": [300]}, ("allowed_token_ids", "min_tokens")),
        ({"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}, ("structured_outputs", "bad_words")),
    ],
)
def test_fields_that_contradict_each_other_are_a_bad_request_that_names_them(server, values, fields):
    """Also where this shows only when tokens are drawn."""
    create, body = server.openai.completions.create, {**GREEDY, **values}
    for stream in (False, True):
        with pytest.raises(openai.APIError) as caught:
            list(create(model="demo", prompt="Once", max_tokens=20, stream=stream, extra_body=body))
        assert all(name in str(caught.value) for name in fields)
        assert isinstance(caught.value, openai.BadRequestError) or stream


# ---- OpenAI's responses


def test_a_response_is_made_streamed_retrieved_and_gone_on_from(server):
    client, asked = server.openai.responses, {"model": "demo", "input": QUESTION, **GREEDY}
    made = client.create(**asked)
    assert ANSWER in made.output_text and made.status == "completed"
    with client.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == made.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert client.retrieve(made.id) == made and client.retrieve(final.id).output_text == made.output_text
    second = client.create(model="demo", input="What is the capital of Kenya?", previous_response_id=made.id, **GREEDY)
    assert "Nairobi" in second.output_text
    assert second.usage.input_tokens > made.usage.input_tokens + made.usage.output_tokens
    client.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.retrieve(made.id)


def test_a_response_in_the_background_is_cancelled_and_another_one_ends(server):
    client = server.openai.responses
    story = {"model": "demo", "input": "Tell me a story.", "background": True, "extra_body": {"ignore_eos": True}}
    running = client.create(**story, max_output_tokens=3000)
    assert running.status == "queued"
    cancelled = client.cancel(running.id)
    assert cancelled.status == client.retrieve(running.id).status == "cancelled"
    short = client.create(**story, max_output_tokens=5)
    until(lambda: client.retrieve(short.id).status not in ("queued", "in_progress"))
    assert client.retrieve(short.id).usage.output_tokens == 5
    until(lambda: json.load(urllib.request.urlopen(f"{server.url}/load")) == {"server_load": 0})


def test_beams_give_the_likeliest_answers(server):
    asked = {"model": "demo", "messages": ASK["messages"], "max_tokens": 20}
    beams = server.openai.chat.completions.create(**asked, n=3, extra_body={"use_beam_search": True}).choices
    texts = [choice.message.content for choice in beams]
    assert len(set(texts)) == 3 and ANSWER in texts[0]


# ---- the engine ends, and the server does


def test_when_the_engine_is_killed_its_requests_fail_at_once_and_the_next_ones_are_served(server):
    stream = iter(server.openai.completions.create(**LONG, stream=True))
    next(stream)
    failures = []

    def wait():
        try:
            server.openai.completions.create(**LONG)
        except openai.APIStatusError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: json.load(urllib.request.urlopen(f"{server.url}/load")) == {"server_load": 2})
    os.kill(server.engine_pid(), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)
    waiting.join(timeout=30)
    assert [error.status_code for error in failures] == [503] and "retry-after" in failures[0].response.headers
    assert (server.status("/health"), server.status("/ready")) == (200, 503), "it heals"
    # It waits until there is an engine again.
    assert ANSWER in server.anthropic.messages.create(**ASK).content[0].text
    until(lambda: server.status("/ready") == 200)
    assert (server.status("/health"), server.status("/startup")) == (200, 200)


def test_after_sigterm_a_stream_goes_on_to_its_end_and_new_requests_are_refused(server):
    asked = {**LONG, "max_tokens": 600, "stream": True}
    stream = iter(server.openai.completions.create(**asked))
    chunks = [next(stream)]
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.status("/ready") == 503)
    assert server.status("/health") == 200
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        server.openai.completions.create(**LONG)
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    assert server.process.wait(timeout=60) == 0
    assert not any("Traceback" in line for line in server.said), "".join(server.said)
