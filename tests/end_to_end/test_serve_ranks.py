"""`jaxpaged serve` with attention ranks: what one device answers, over HTTP, with streams, aborts and preemption."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxpaged import LLM, SamplingParams, StructuredOutputsParams
from tests.end_to_end.conftest import started
from tests.end_to_end.test_processes import all_below
from tests.engine.small_tokenizer import make_backend
from tests.models.checkpoints import CONFIGS

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytest.importorskip("uvicorn", reason="comes with the extra test")

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "load_format": "dummy",
    "max_model_len": 64,
    "block_size": 8,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "token_buckets": (16,),
    "num_gpu_blocks_override": 14,
}
FLAGS = (
    "--load-format dummy --max-model-len 64 --block-size 8 --max-num-seqs 4 --max-num-batched-tokens 16 "
    "--token-buckets 16 --num-gpu-blocks-override 14 --data-parallel-size 2 --enable-expert-parallel --port 0"
).split()
ASKED = [
    ("the cat sat", {"temperature": 0.0, "logprobs": 2}),
    ("the dog", {"temperature": 0.9, "seed": 5, "logprobs": 1}),
    ("a bird sang to", {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    ("on the mat", {"temperature": 1.0, "seed": 7, "logit_bias": {"40": 3.0}, "min_tokens": 9}),
    ("the sun", {"temperature": 0.0, "structured_outputs": {"regex": "[ab]{9}"}}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with experts, whose weights are random, and text."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["mixtral"], "vocab_size": 300}))
    make_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """What one device answers: of each of `ASKED`, and of a stop string, which is a part of the first."""
    with LLM(str(folder), **OPTIONS) as llm:
        params = [SamplingParams(max_tokens=20, ignore_eos=True, **in_python(fields)) for _, fields in ASKED]
        outputs = llm.generate([prompt for prompt, _ in ASKED], params, use_tqdm=False)
        return [output.outputs[0] for output in outputs]


def in_python(fields):
    shape = fields.get("structured_outputs")
    changed = {"structured_outputs": StructuredOutputsParams(**shape)} if shape else {}
    if bias := fields.get("logit_bias"):
        changed["logit_bias"] = {int(token): value for token, value in bias.items()}
    return fields | changed


@pytest.fixture(scope="module")
def served(folder):
    command = [sys.executable, "-m", "jaxpaged", "serve", str(folder), "--served-model-name", "ranks", *FLAGS]
    process, (address,) = started(*command)
    threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe stops it
    yield process, address
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def address(served):
    return served[1]


@pytest.fixture(scope="module")
def process(served):
    return served[0]


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client, prompt, fields, **further):
    ours = {"temperature", "seed", "logprobs", "presence_penalty", "logit_bias", "stop"}
    body = {name: value for name, value in fields.items() if name not in ours} | {"ignore_eos": True}
    known = {"max_tokens": 20, **{name: value for name, value in fields.items() if name in ours}, **further}
    return client.completions.create(model="ranks", prompt=prompt, extra_body=body, **known)


def metrics(address):
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.split("{")[0].split(" ")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)


pytestmark = pytest.mark.slow


def test_ranks_answer_over_http_what_one_device_does(client, alone):
    """Draws, log probabilities, penalties, a grammar: many requests at a time, of which each rank has some."""
    with ThreadPoolExecutor(15) as pool:
        answers = list(pool.map(lambda each: ask(client, *each), ASKED * 3))
    for answer, expected, (_, fields) in zip(answers, alone * 3, ASKED * 3, strict=True):
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason
        if "logprobs" in fields:
            of_tokens = [each[token].logprob for each, token in zip(expected.logprobs, expected.token_ids, strict=True)]
            assert answer.choices[0].logprobs.token_logprobs == pytest.approx(of_tokens, abs=1e-3)


def test_a_stream_and_a_stop_string_say_the_same(client, alone):
    chunks = list(ask(client, *ASKED[1], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == alone[1].text
    stop = alone[0].text[5:8]
    answer = ask(client, ASKED[0][0], ASKED[0][1] | {"stop": [stop]}).choices[0]
    assert answer.text == alone[0].text[: alone[0].text.index(stop)] and answer.finish_reason == "stop"


def test_a_request_beyond_its_room_is_refused_and_others_are_not(client, alone):
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.completions.create(model="ranks", prompt=[40] * 70)
    assert ask(client, *ASKED[0]).choices[0].text == alone[0].text


def test_who_leaves_frees_the_blocks_of_a_rank_and_requests_that_were_preempted_end_as_ever(client, address, alone):
    """Each rank has room for one of its requests at full length, and four rows."""
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(client, *ASKED[0], max_tokens=50), range(16)))
    texts = {answer.choices[0].text for answer in answers}
    assert len(texts) == 1 and texts.pop().startswith(alone[0].text)
    assert metrics(address)["vllm:num_preemptions_total"] > 0
    streams = [ask(client, *ASKED[0], max_tokens=50, stream=True) for _ in range(8)]
    for stream in streams:
        next(iter(stream))
        stream.close()
    wait_for(lambda: metrics(address)["vllm:num_requests_running"] == 0)
    wait_for(lambda: metrics(address)["vllm:kv_cache_usage_perc"] == 0)
    assert ask(client, *ASKED[0]).choices[0].text == alone[0].text


def test_a_killed_core_fails_the_requests_of_all_ranks_and_is_replaced(client, address, process, alone):
    [core] = [pid for pid in all_below(process.pid) if b"core_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    streams = [ask(client, *ASKED[0], max_tokens=50, stream=True) for _ in range(8)]
    for stream in streams:
        next(iter(stream))
    os.kill(core, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match="failed while the request was under way"):
            list(stream)
    assert ask(client, *ASKED[0]).choices[0].text == alone[0].text, "who asks meanwhile waits for the next one"
    assert not Path(f"/proc/{core}").exists()
    wait_for(lambda: metrics(address)["vllm:num_requests_running"] == 0)


def test_a_signal_ends_the_server_and_nothing_is_left(process, address, client):
    assert ask(client, *ASKED[0]).choices[0].text
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    left = children.read_text().split() if children.exists() else []
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in left))
