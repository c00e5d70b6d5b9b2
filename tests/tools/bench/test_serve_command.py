"""`jaxpaged bench serve` as a person types it: against our servers without a model, and against bad ones."""

import json
from pathlib import Path

import pytest

from jaxpaged.entrypoints.cli import FAILURE, USAGE
from jaxpaged.tools.bench import report
from jaxpaged.tools.bench.metrics import DETAILS
from tests.entrypoints.http.live_server import live_server
from tests.tools.bench.conftest import answer, live_grpc

FIELDS = {
    "date",
    "endpoint_type",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    "rtfx",
} | {f"{what}_{name}_ms" for name in ("ttft", "tpot", "itl") for what in ("mean", "median", "std", "p99")}
"""What vLLM's results have, details left out."""


@pytest.fixture
def questions(tmp_path):
    """Flags for a small file of prompts, which need no tokenizer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "d e", "f")), encoding="utf-8")
    return [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        "--custom-output-len",
        "5",
        "--skip-tokenizer-init",
        "--skip-chat-template",
        "--ignore-eos",
    ]


def place(over, **settings):
    """A server, and the flags that find it."""
    if over.startswith("grpc"):
        return live_grpc(**settings)
    return live_server(**settings)


def where(over, served):
    url = served if over.startswith("grpc") else served[0]
    return ["--backend", over, "--base-url", url]


def saved(folder):
    [path] = Path(folder).glob("*.json")
    return path.name, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("over", ["openai", "openai-chat", "grpc", "grpc-chat"])
def test_every_backend_gives_the_same_kind_of_result(over, bench, questions, tmp_path):
    with place(over) as served:
        status, out, err = bench(
            "serve",
            *where(over, served),
            *questions,
            "--num-prompts",
            "4",
            "--num-warmups",
            "2",
            "--temperature",
            "0",
            "--save-result",
            "--save-detailed",
            "--result-dir",
            str(tmp_path / "r"),
            "--metadata",
            "machine=a",
            "b=c=d",
            "--goodput",
            "e2el:100000",
            "--max-concurrency",
            "2",
        )
    assert status == 0, err
    name, found = saved(tmp_path / "r")
    assert name == f"{over}-infqps-concurrency2-fake-{found['date']}.json"
    assert set(found) >= FIELDS and set(DETAILS) <= set(found)
    assert (found["completed"], found["failed"], found["num_prompts"]) == (4, 0, 4)
    assert found["total_output_tokens"] == 20 and found["output_lens"] == [5] * 4
    assert found["total_input_tokens"] == sum(found["input_lens"]) > 0
    assert found["request_rate"] == "inf" and found["max_concurrency"] == 2 and found["backend"] == over
    assert found["machine"] == "a" and found["b"] == "c=d" and found["model_id"] == "fake"
    assert found["request_goodput"] == found["request_throughput"] and found["max_concurrent_requests"] <= 2
    assert all(found["generated_texts"]) and found["errors"] == [""] * 4
    assert "Successful requests:                     4\n" in out and "Mean TTFT (ms):" in out
    assert "(tok/s):" in out and "Request goodput (req/s):" in out


def test_http_and_grpc_ask_for_the_same(bench, questions):
    """What reaches the engine is equal, so what is measured is the transport."""
    reached = []
    for over in ("openai", "grpc"):
        flags = ["--num-prompts", "3", "--disable-shuffle", "--temperature", "0.5", "--extra-body", '{"seed": 7}']
        if over == "openai":
            with live_server() as served:
                assert bench("serve", *where(over, served), *questions, *flags)[0] == 0
                seen = served[1].engine.seen
        else:
            with live_grpc_engine() as (target, engine):
                assert bench("serve", *where(over, target), *questions, *flags)[0] == 0
                seen = engine.seen
        reached.append(
            [
                (prompt, params.temperature, params.seed, params.max_tokens, params.ignore_eos)
                for prompt, params, _ in seen[1:]
            ]
        )
    assert reached[0] == reached[1] and len(reached[0]) == 3


def live_grpc_engine():
    """(place, engine) of a gRPC server."""
    import contextlib

    from tests.entrypoints.http import live_server as module

    @contextlib.contextmanager
    def running():
        made = []
        original = module.make_service

        def keeping(**settings):
            made.append(original(**settings))
            return made[-1]

        module.make_service = keeping
        try:
            with live_grpc() as target:
                yield target, made[0].engine
        finally:
            module.make_service = original

    return running()


@pytest.mark.parametrize("over", ["openai", "grpc"])
def test_a_wrong_key_a_wrong_model_and_a_right_key(over, bench, questions, monkeypatch):
    with place(over, keys=("secret",)) as served:
        flags = [*where(over, served), *questions, "--num-prompts", "2", "--model", "fake"]
        status, _, err = bench("serve", *flags, "--api-key", "wrong")
        assert status == FAILURE and "--api-key" in err and err.count("\n") == 1
        status, _, err = bench("serve", *flags[:-1], "other", "--api-key", "secret")
        assert status == FAILURE and "'other'" in err and "--model" in err
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert bench("serve", *flags)[0] == 0


@pytest.mark.parametrize(("over", "url"), [("openai", "http://127.0.0.1:9"), ("grpc", "127.0.0.1:9")])
def test_a_server_that_is_not_there(over, url, bench, questions):
    status, out, err = bench("serve", "--backend", over, "--base-url", url, *questions)
    assert status == FAILURE and out == ""
    assert f"no answer from {url}" in err and "--base-url" in err and err.count("\n") == 1
    assert "Traceback" not in err


def test_half_of_the_requests_failing_is_told_and_is_a_failure(bench, questions, scripted, tmp_path):
    def script(path, body, headers):
        if body is None or body["prompt"] != "d e":
            return (404, [b"{}"]) if body is None else (200, answer("a", "b"))
        return 500, [b'{"error": {"message": "out of memory at block 17"}}']

    server = scripted(script)
    status, out, err = bench(
        "serve",
        "--base-url",
        server.url,
        "--model",
        "m",
        *questions,
        "--num-prompts",
        "6",
        "--disable-shuffle",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path / "r"),
    )
    _, found = saved(tmp_path / "r")
    assert status == FAILURE and found["failed"] == found["errors"].count(found["errors"][1]) > 0
    assert found["completed"] + found["failed"] == 6 and found["total_output_tokens"] == 2 * found["completed"]
    assert "out of memory at block 17" in found["errors"][1] and found["output_lens"][1] == 0
    assert f"failed: {found['failed']} x the server answers 500: out of memory at block 17" in err
    assert f"Failed requests:                         {found['failed']}\n" in out


def test_requests_ask_for_what_vllm_asks_for(bench, questions, scripted):
    server = scripted(lambda path, body, headers: (404, [b"{}"]) if body is None else (200, answer("a")))
    flags = ["--base-url", server.url, "--model", "m", *questions, "--num-prompts", "1", "--disable-shuffle"]
    assert bench("serve", *flags, "--top-k", "3", "--logprobs", "2", "--served-model-name", "n")[0] == 0
    assert server.seen[-1] == {
        "model": "n",
        "prompt": "abc",
        "max_tokens": 5,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 3,
    }
    chat = [*flags, "--backend", "openai-chat"]
    del chat[chat.index("--ignore-eos")]
    assert bench("serve", *chat)[0] == 0
    assert server.seen[-1] == {
        "model": "m",
        "messages": [{"role": "user", "content": "abc"}],
        "max_completion_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_timeline_is_drawn_beside_the_result(bench, questions, scripted, tmp_path):
    server = scripted(lambda path, body, headers: (404, [b"{}"]) if body is None else (200, answer("a", "b")))
    flags = [
        "--base-url",
        server.url,
        "--model",
        "m",
        *questions,
        "--num-prompts",
        "2",
        "--save-result",
        "--plot-timeline",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "a.json",
    ]
    status, _, err = bench("serve", *flags)
    assert status == 0 and "a.timeline.png" in err
    assert (tmp_path / "a.timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_server_records_its_devices_during_the_measurement_only(bench, questions, scripted):
    asked, refused = [], []

    def script(path, body, headers):
        if path.endswith("_profile"):
            asked.append((path, headers["Authorization"]))
            return (404, [b'{"error": "no such path"}']) if path in refused else (200, [b"{}"])
        if body is not None:
            asked.append(path)
        return 200, answer("a")

    server = scripted(script)
    flags = [
        "--base-url",
        server.url,
        "--model",
        "m",
        *questions,
        "--num-prompts",
        "1",
        "--num-warmups",
        "1",
        "--profile",
        "--api-key",
        "k",
    ]
    assert bench("serve", *flags)[0] == 0
    completions = "/v1/completions"
    start, stop = ("/start_profile", "Bearer k"), ("/stop_profile", "Bearer k")
    assert asked == [completions, completions, start, completions, stop]
    refused.append("/stop_profile")
    status, out, err = bench("serve", *flags)
    assert status == 0 and "Successful requests:" in out and "recording of the devices did not end" in err
    refused.append("/start_profile")
    status, out, err = bench("serve", *flags)
    assert status == FAILURE and out == "" and "answers 404" in err and "--admin-base-url" in err
    status, _, err = bench("serve", *flags, "--admin-base-url", "http://127.0.0.1:1")
    assert status == FAILURE and "no answer from http://127.0.0.1:1" in err


def test_results_are_appended_as_lines(bench, questions, scripted, tmp_path):
    server = scripted(lambda path, body, headers: (404, [b"{}"]) if body is None else (200, answer("a", "b")))
    flags = [
        "--base-url",
        server.url,
        "--model",
        "m",
        *questions,
        "--num-prompts",
        "2",
        "--append-result",
        "--result-dir",
        str(tmp_path / "r"),
        "--result-filename",
        "all.jsonl",
    ]
    assert [bench("serve", *flags)[0] for _ in range(2)] == [0, 0]
    lines = (tmp_path / "r" / "all.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 2 and all(each["completed"] == 2 for each in found) and "errors" not in found[0]


def test_a_server_that_is_not_ready_is_waited_for_if_asked(bench, questions, scripted):
    asked = []

    def script(path, body, headers):
        if path == "/ready":
            asked.append(path)
            return (503, [b'{"error": {"message": "3 of 7 programs are compiled."}}']) if len(asked) < 3 else (200, [])
        return 200, answer("a")

    server = scripted(script)
    flags = ["--base-url", server.url, "--model", "m", *questions, "--num-prompts", "1"]
    status, _, err = bench("serve", *flags)
    assert status == 0 and "not at full speed yet: 3 of 7 programs" in err and len(asked) == 1
    status, _, err = bench("serve", *flags, "--ready-check-timeout-sec", "30")
    assert status == 0 and err == "" and len(asked) == 3
    asked.clear()
    status, _, err = bench("serve", *flags, "--ready-check-timeout-sec", "0.01")
    assert status == FAILURE and "not ready after 0.01 s" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--percentile-metrics", "speed"], "'speed'"),
        (["--metric-percentiles", "200"], "200"),
        (["--goodput", "ttft"], "--goodput"),
        (["--metadata", "a"], "KEY=VALUE"),
        (["--header", "a"], "KEY=VALUE"),
        (["--self-timed"], "timed_trace"),
        (["--dataset-name", "burstgpt", "--dataset-path", "x", "--self-timed", "--request-rate", "1"], "its own times"),
        (["--dataset-name", "random-mm"], "random-mm is not supported: requests take text only"),
        (["--endpoint", "/v1/chat/completions"], "--endpoint"),
        (["--backend", "grpc", "--insecure"], "for HTTP"),
        (["--backend", "grpc", "--base-url", "http://x:1"], "host:port"),
        (["--dataset-path", "x"], "reads no file"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--save-detailed"], "--save-result"),
        (["--plot-timeline", "--append-result"], "--save-result"),
        (["--backend", "grpc", "--profile"], "--admin-base-url"),
        (["--save-result", "--result-dir", "/proc/nothing"], "/proc/nothing"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rates", "1"], "--request-rate"),
        (["--extra-body", "5"], "JSON object"),
        (["--extra-body", '{"temperature": NaN}'], "'NaN' is not a finite number"),
        (["--temperature", "nan"], "'nan' is not a finite number"),
    ],
)
def test_wrong_usage_is_one_line_and_nothing_is_asked(flags, words, bench):
    status, out, err = bench("serve", *flags)
    assert status == USAGE and words in err and err.count("\n") == 1 and out == ""


def test_errors_that_differ_in_numbers_are_one_kind():
    assert report.failures(["a 1", "b", "a 22", ""]) == ["2 x a 1", "1 x b"]
    assert report.failures([f"kind {letter}" for letter in "abcdefg"])[-1] == "2 x other errors"
    assert report.failures(["", ""]) == []
