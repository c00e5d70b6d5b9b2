"""One engine computes a prompt and another goes on: the same text, whatever happens to the first one."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import msgspec
import pytest

from jaxpaged import LLM
from tests.end_to_end.conftest import SERVE
from tests.end_to_end.test_handover_pairs import use
from tests.end_to_end.test_kv_offload import GREEDY, OPTIONS, PROMPTS, answers, worker_of
from tests.end_to_end.test_kv_offload_together import BOUND

openai = pytest.importorskip("openai", reason="comes with the extra test")
pytestmark = pytest.mark.slow
PAIR = (
    sys.executable,
    "-m",
    "jaxpaged",
    "proxy",
    "--port",
    "0",
    "--start",
    "1p1d",
    "--min-prefill-tokens",
    "50",
    "--",
    *SERVE[SERVE.index("--max-num-seqs") :],
    "--block-size",
    "16",
    "--max-model-len",
    "512",
)
BOUND_PROMPT = "How many boats are in the harbour? " * 20


# Rounded pages between engines with other blocks, as parts of a page and as several, and other numbers of devices, of
# which 4 share the model's 2 heads.
PAIRS = {
    "int8": ({"block_size": 16, "tensor_parallel_size": 2}, {"block_size": 64}),
    "fp8": ({"block_size": 32}, {"block_size": 16, "tensor_parallel_size": 4}),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request):
    pages, (first, second) = f"host=64M,pages={request.param}", PAIRS[request.param]
    with (
        LLM(**OPTIONS | first, kv_role="kv_producer", kv_offload=pages) as producer,
        LLM(**OPTIONS | second, kv_role="kv_consumer", kv_offload=pages) as consumer,
    ):
        yield producer, consumer


def ask(llm, prompt, max_tokens=8, params=GREEDY, **transfer):
    params = msgspec.structs.replace(params, max_tokens=max_tokens, extra_args={"kv_transfer_params": transfer})
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    return result


def test_a_prompt_is_handed_over(pair):
    producer, consumer = pair
    expected, _ = answers(producer, PROMPTS)
    for prompt, tokens, transport in zip(PROMPTS, expected, ("shared_memory", "shared_memory", "tcp")):
        use(consumer, transport)
        said = ask(producer, prompt, 1, do_remote_decode=True).kv_transfer_params
        result = ask(consumer, prompt, **said)
        assert result.outputs[0].token_ids == tokens and result.kv_transfer_params is None
        assert result.num_cached_tokens >= said["remote_num_tokens"] - 64 > 0
    carried = worker_of(consumer).stats()["kv_borrowed_pages"]
    assert carried["tcp"] > 0 and carried["shared_memory"] > 0
    assert worker_of(producer).stats()["recompiles"] == worker_of(consumer).stats()["recompiles"] == 0
    said = ask(producer, "Short.", 1, do_remote_decode=True).kv_transfer_params
    assert said is None, "less than a block is not worth a lease"


def test_a_grammar_goes_on_behind_a_prompt_that_was_handed_over(pair):
    producer, consumer = pair
    if worker_of(consumer).config.parallel.tensor_parallel_size > 1:
        pytest.skip("its programs take long to compile, and one consumer is enough")
    bound = ask(producer, BOUND_PROMPT, 12, BOUND)
    ask(consumer, "How many?", 12, BOUND)  # a lease would end while programs are compiled for it
    said = ask(producer, BOUND_PROMPT, 1, do_remote_decode=True).kv_transfer_params
    result = ask(consumer, BOUND_PROMPT, 12, BOUND, **said)
    assert result.outputs[0].text == bound.outputs[0].text and result.outputs[0].text.isdigit()
    assert result.num_cached_tokens >= said["remote_num_tokens"] - 64 > 0


def post(url, body, path="completions"):
    request = urllib.request.Request(
        f"{url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def begin(url, body):
    """A stream that says where its prompt is lent: the connection, and that."""
    connection = http.client.HTTPConnection(*url.removeprefix("http://").split(":"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = json.loads(answer.readline()[6:])
    assert first["choices"] == []
    return connection, answer, first["kv_transfer_params"]


def sample(url, name):
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(rf"^{re.escape(name)}\S* (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(found[1])


@pytest.fixture
def servers():
    """Two engines and the proxy before them, by one command: (the first one's process, addresses, the proxy's). The
    engines end with the proxy, even if that is killed."""
    process = subprocess.Popen(PAIR, stderr=subprocess.PIPE, text=True)
    urls = {}
    for line in process.stderr:
        if found := re.search(r"(?:(prefill|decode) engine 0: .*|engines are )served at (http://[^ ,]+)", line):
            urls[found[1]] = found[2].rstrip(".\n")
        if None in urls:
            break
    threading.Thread(target=process.stderr.read, daemon=True).start()
    first, second = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    yield first, (urls["prefill"], urls["decode"]), urls[None]
    process.kill()
    process.wait()
    assert ends(first) and ends(second)


def ends(process):
    """Whether a process, which may be nobody's child any more, does so soon."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def check_a_chat(prefill, decode, proxy):
    """OpenAI's client streams through the proxy what one server alone would say, and its prompt was handed over."""
    asked = {"model": "demo", "messages": [{"role": "user", "content": PROMPTS[2]}], "temperature": 0, "max_tokens": 12}
    names = ("vllm:external_prefix_cache_hits_total", "jaxpaged:kv_borrowed_bytes_total")
    client = lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
    with client(prefill) as alone:
        expected = alone.chat.completions.create(**asked)
    tokens, moved = (sample(decode, name) for name in names)
    with client(proxy) as streams:
        chunks = list(streams.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == expected.choices[0].message.content
    assert choices[0].delta.role == "assistant" and choices[-1].finish_reason == expected.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    assert sample(decode, names[0]) > tokens + 60 and sample(decode, names[1]) > moved, "through shared memory"


def test_two_servers_and_the_proxy_and_what_they_do_when_the_first_stops_and_dies(servers):
    producer, (prefill, decode), proxy = servers
    prompts = [f"{number}. {PROMPTS[0]}" for number in range(7)]
    bodies = [{"prompt": each, "max_tokens": 8, "temperature": 0, "ignore_eos": True} for each in prompts]
    expected = [json.loads(post(prefill, body))["choices"][0]["text"] for body in bodies]
    text = lambda answer: json.loads(answer)["choices"][0]["text"]
    cached = "vllm:external_prefix_cache_hits_total"

    assert text(post(proxy, bodies[0])) == expected[0]
    assert sample(proxy, "jaxpaged:proxy_handed_over_total") == 1 and sample(decode, cached) > 60
    assert sample(prefill, "jaxpaged:kv_leases_granted_total") == 1
    events = post(proxy, {**bodies[0], "stream": True}).split("\n\n")
    assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in events if each[6:7] == "{") == expected[0]
    check_a_chat(prefill, decode, proxy)

    ask = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    lent = [
        json.loads(post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": ask}))["kv_transfer_params"]
        for body in bodies
    ]
    assert text(post(decode, {**bodies[1], "kv_transfer_params": lent[1]})) == expected[1]
    question, before = {"input": prompts[1], "temperature": 0, "max_output_tokens": 8}, sample(decode, cached)
    said = lambda answer: json.loads(answer)["output"][0]["content"][0]["text"]
    first = json.loads(post(prefill, {**question, "max_output_tokens": 1, "kv_transfer_params": ask}, "responses"))
    again = post(decode, {**question, "kv_transfer_params": first["kv_transfer_params"]}, "responses")
    assert said(again) == said(post(prefill, question, "responses")) and sample(decode, cached) > before + 60
    asked = [{**body, "max_tokens": 1, "stream": True, "kv_transfer_params": ask} for body in bodies]
    connection, answer, early = begin(prefill, asked[4])
    before = sample(decode, cached)
    assert text(post(decode, {**bodies[4], "kv_transfer_params": early})) == expected[4]
    assert sample(decode, cached) > before + 60 and b"[DONE]" in answer.read()
    connection.close()
    connection, answer, early = begin(prefill, asked[5])
    answer.close()
    connection.close()  # which aborts it, if it is not computed yet
    assert text(post(decode, {**bodies[5], "kv_transfer_params": early})) == expected[5]
    connection, _, early = begin(prefill, asked[6])
    os.kill(producer, signal.SIGSTOP)  # what it lends never comes
    assert text(post(decode, {**bodies[6], "kv_transfer_params": early})) == expected[6]
    connection.close()
    assert text(post(decode, {**bodies[2], "kv_transfer_params": lent[2]})) == expected[2]
    os.kill(producer, signal.SIGKILL)
    assert ends(producer)
    assert text(post(decode, {**bodies[3], "kv_transfer_params": lent[3]})) == expected[3]
    assert text(post(proxy, bodies[3])) == expected[3], "without prefill engines the decode engine computes"
