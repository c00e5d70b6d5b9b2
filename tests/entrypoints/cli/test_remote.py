"""`--server`: commands over gRPC, against a real server whose engine has no model."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading

import pytest

pytest.importorskip("grpc_health")
pytest.importorskip("starlette")

from jaxpaged.entrypoints.cli import main
from tests.entrypoints.http.live_server import make_service

PROMPTS = ["the cat", "once upon a time"]


@contextlib.contextmanager
def grpc_server(*, keys=(), options=None, **engine_options):
    """Yields (address, service, loop) of a server that runs in a thread."""
    from jaxpaged.entrypoints.grpc.server import GrpcListener

    started, found = threading.Event(), {}

    async def serve():
        service = make_service(options, **engine_options)
        listener = GrpcListener(service, ["127.0.0.1:0"], keys=keys)
        await listener.listen()
        found.update(service=service, listener=listener, loop=asyncio.get_running_loop())
        started.set()
        await listener.run_until_stopped()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield f"127.0.0.1:{found['listener'].ports[0]}", found["service"], found["loop"]
    finally:
        found["loop"].call_soon_threadsafe(setattr, found["listener"], "should_exit", True)
        thread.join()


@pytest.fixture(scope="module")
def server():
    with grpc_server(max_model_len=128) as (address, service, _):
        yield address, service


@pytest.fixture
def ask(capsys):
    """`ask("generate", ...)`: (exit status, standard output, standard error)."""

    def run(*arguments):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def lines_of(output):
    return [json.loads(line) for line in output.splitlines()]


def alone(service, prompt, **params):
    """What the same engine, asked in this process, says: `RequestOutput`."""
    from jaxpaged.sampling_params import SamplingParams
    from tests.engine.fake_engine import make_engine

    engine, _ = make_engine(max_model_len=128)
    engine.add_request("r", prompt, SamplingParams(**params))
    results = []
    while engine.has_unfinished_requests():
        results += engine.step()
    return results[-1]


def test_prompts_are_answered_as_by_an_engine_in_this_process(ask, server):
    address, service = server
    flags = ["--raw", "--json", "--temperature", "0", "--max-tokens", "9", "--logprobs", "2", "--ignore-eos"]
    status, out, err = ask("generate", "--server", address, *flags, *PROMPTS)
    assert (status, err) == (0, "")
    lines = lines_of(out)
    assert [line["prompt"] for line in lines] == PROMPTS
    for line in lines:
        own = alone(service, line["prompt"], temperature=0, max_tokens=9, logprobs=2, ignore_eos=True)
        [completion] = own.outputs
        assert line["text"] == completion.text
        assert line["token_ids"] == completion.token_ids
        assert (line["finish_reason"], line["stop_reason"], line["error"]) == ("length", None, None)
        assert line["num_prompt_tokens"] == len(own.prompt_token_ids)
        assert line["cumulative_logprob"] == pytest.approx(completion.cumulative_logprob, rel=1e-5)
        for position, candidates in zip(line["logprobs"], completion.logprobs, strict=True):
            assert list(position) == [str(token_id) for token_id in candidates]
            for token_id, candidate in candidates.items():
                assert position[str(token_id)]["logprob"] == pytest.approx(candidate.logprob, rel=1e-5)
                assert position[str(token_id)]["rank"] == candidate.rank


def test_text_streams_and_several_sequences_share_a_prompt(ask, server):
    address, _ = server
    status, out, _ = ask("generate", "--server", address, "--raw", "--max-tokens", "4", "the cat")
    assert status == 0
    assert len(out) > 1
    status, out, _ = ask("generate", "--server", address, "--json", "-n", "3", "--seed", "7", "--max-tokens", "4", "hi")
    assert (status, [line["sequence"] for line in lines_of(out)]) == (0, [0, 1, 2])


def test_sampling_flags_and_the_usual_lengths_reach_the_server(ask, server):
    address, service = server
    before = len(service.engine.seen)
    ask("generate", "--server", address, "--top-k", "5", "--stop", "x", "--system", "Be short.", "hi")
    ask("generate", "--server", address, "--raw", "hi")
    ask("generate", "--server", address, "--raw", "--max-tokens", "none", "--prompt-logprobs", "1", "hi")
    (_, chat, _), (_, raw, _), (_, whole, _) = service.engine.seen[before:]
    assert (chat.top_k, chat.stop, chat.max_tokens) == (5, ["x"], 2048)
    assert raw.max_tokens == 256
    assert (whole.max_tokens, whole.prompt_logprobs) == (2**31 - 1, 1)


def test_prompts_of_ids_and_chats_come_from_a_file(ask, server, tmp_path):
    address, service = server
    before = len(service.engine.seen)
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bad = {"messages": [{"role": "user", "contents": "hi"}]}
    file.write_text("\n".join(map(json.dumps, ({"prompt": [5, 6, 7]}, chat, bad))), encoding="utf-8")
    status, out, err = ask("generate", "--server", address, "--max-tokens", "2", "--json", "--file", str(file))
    lines = lines_of(out)
    assert status == 1
    assert "prompt 2" in err
    assert "contents" in err
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert lines[2]["error"] is not None
    assert [5, 6, 7] in [prompt["prompt_token_ids"] for prompt, _, _ in service.engine.seen[before:]]


def test_a_prompt_that_the_server_refuses_is_named_and_the_others_finish(ask, server):
    address, _ = server
    flags = ["--raw", "--max-tokens", "3", "--json"]
    status, out, err = ask("generate", "--server", address, *flags, "the cat", "word " * 200, "once")
    assert status == 1
    assert "prompt 1" in err
    assert "max_model_len" in err
    assert [line["finish_reason"] for line in lines_of(out)] == ["length", "error", "length"]


def test_a_chat_goes_on_over_several_turns(ask, piped, server):
    address, service = server
    before = len(service.engine.seen)
    piped("hi\nand you?\n")
    status, out, err = ask("chat", "--server", address, "--max-tokens", "4", "--temperature", "0")
    assert (status, err) == (0, "")
    assert out.count("\n") >= 2
    first, second = (prompt["prompt"] for prompt, _, _ in service.engine.seen[before:])
    assert "hi" in first
    assert "and you?" in second
    assert len(second) > len(first) + len("and you?")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["generate", "--server", "127.0.0.1:9", "hi"], 1, "no answer from 127.0.0.1:9"),
        (["chat", "--server", "127.0.0.1:9"], 1, "Is the server running there?"),
        (["generate", "--server", "localhost", "hi"], 2, "--server is 'localhost'; it must be HOST:PORT"),
        (["generate", "--server", "HERE", "--max-num-seqs", "3", "hi"], 2, "--max-num-seqs is an option of an engine"),
        (["generate", "--server", "HERE", "--stats", "hi"], 2, "--stats is an option of an engine"),
        (["generate", "--server", "HERE", "--trace", "t.json", "hi"], 2, "--trace is an option of an engine"),
        (["generate", "--server", "HERE", "--no-detokenize", "hi"], 2, "--detokenize cannot be asked of a server"),
        (["generate", "--server", "HERE", "-m", "other", "hi"], 2, "the server has no model 'other'. It has fake."),
        (["generate", "--server", "HERE", "--ssl-ca-certs", "/no/file", "hi"], 2, "cannot read /no/file"),
        (["generate", "--server", "HERE", "--api-key-file", "/no/file", "hi"], 2, "Check --api-key-file"),
        (["generate", "--server", "HERE", "--timeout", "0", "hi"], 2, "--timeout is 0"),
        (["generate", "--timeout", "3", "hi"], 2, "--timeout is for --server, which is not given"),
        (["chat", "--ssl"], 2, "--ssl is for --server"),
        (["chat", "--server", "HERE", "--url", "http://x"], 2, "--url and --server are given"),
        (["generate", "--server", "HERE", "--temperature", "9", "hi"], 2, "temperature is 9"),
    ],
)
def test_what_cannot_be_is_one_line(ask, piped, server, arguments, status, said):
    piped("hi\n")
    ended, out, err = ask(*(server[0] if word == "HERE" else word for word in arguments))
    assert (ended, out) == (status, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_server_with_keys_wants_one(ask, tmp_path):
    key = tmp_path / "key"
    key.write_text("sesame\n", encoding="utf-8")
    with grpc_server(keys=["sesame"]) as (address, _, _):
        status, _, err = ask("generate", "--server", address, "--raw", "hi")
        assert status == 1
        assert "Give its key with --api-key-file" in err
        arguments = ["generate", "--server", address, "--raw", "--max-tokens", "2", "hi"]
        assert ask(*arguments, "--api-key-file", str(key))[0] == 0


def test_an_answer_that_takes_too_long_fails_alone_and_ends_in_the_engine(ask):
    with grpc_server() as (address, service, loop):
        loop.call_soon_threadsafe(service.engine.go_on.clear)
        status, _, err = ask("generate", "--server", address, "--raw", "--timeout", "0.5", "hi")
        assert status == 1
        assert "took longer than --timeout allows" in err
        loop.call_soon_threadsafe(service.engine.go_on.set)


def test_an_engine_that_died_in_the_server_fails_each_prompt_by_its_name(ask):
    with grpc_server() as (address, service, _):
        service.engine.is_dead = True
        status, _, err = ask("generate", "--server", address, "--raw", "hi", "there")
    assert status == 1
    assert "prompt 0 ('hi')" in err
    assert "prompt 1 ('there')" in err
    assert err.count("The engine has stopped") == 2


def test_nothing_of_the_engine_is_loaded(server):
    """The process starts in the time that grpcio takes."""
    script = (
        "import sys; from jaxpaged.entrypoints.cli import main; "
        f"status = main(['generate', '--server', '{server[0]}', '--raw', '--max-tokens', '3', 'hi']); "
        "print(sorted({'jax', 'transformers', 'tokenizers', 'jaxpaged.engine.core'} & set(sys.modules))); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
