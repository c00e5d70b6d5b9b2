"""`jaxpaged chat` from a pipe, with an engine that echoes the whole conversation."""

import http.server
import json
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxpaged.entrypoints.cli.server_answers import Arrivals, ServerAnswers
from tests.entrypoints.cli.conftest import EchoInputs


def test_every_line_is_a_turn_and_the_conversation_grows(run, piped):
    piped("Hi\nAgain\n")
    finished = run("chat")
    assert finished.status == 0
    first = "user:Hi"
    assert finished.out == f"{first}\nuser:Hi|assistant:{first}|user:Again\n"
    assert finished.err == ""


def test_the_system_message_comes_first_and_stays_after_clear(run, piped):
    piped("Hi\n/clear\nHo\n")
    finished = run("chat", "--system", "Be brief")
    assert finished.out == "system:Be brief|user:Hi\nsystem:Be brief|user:Ho\n"


def test_system_can_be_changed_and_starts_over(run, piped):
    piped("Hi\n/system Shout\nHo\n/system\nHm\n")
    assert run("chat").out == "user:Hi\nsystem:Shout|user:Ho\nuser:Hm\n"


def test_exit_ends_the_conversation(run, piped):
    piped("/exit\nHi\n")
    finished = run("chat")
    assert (finished.status, finished.out) == (0, "")


def test_help_lists_the_commands(run, piped):
    piped("/help\n")
    finished = run("chat")
    assert all(name in finished.err for name in ("/help", "/clear", "/system", "/exit"))


def test_an_unknown_command_names_the_nearest_and_counts_as_a_failure(run, piped):
    piped("/claer\nHi\n")
    finished = run("chat")
    assert finished.status == 1
    assert finished.err == "jaxpaged chat: unknown command '/claer'. Did you mean '/clear'?\n"
    assert finished.out == "user:Hi\n"


def test_a_failed_turn_is_forgotten_and_the_next_one_works(run, piped):
    piped("refuse\nfail\nHi\n")
    finished = run("chat")
    assert finished.status == 1
    assert "is refused" in finished.err
    assert "its logits are not numbers" in finished.err
    assert finished.out.splitlines()[-1] == "user:Hi"


def test_answers_have_a_length_that_a_person_survives_unless_another_is_asked_for(run, piped):
    piped("Hi\n/set max_tokens none\nHi\n/set max_tokens 5\nHi\n/set max_tokens\nHi\n")
    assert [params.max_tokens for params in run("chat").engine.params] == [2048, None, 5, 2048]
    piped("Hi\n")
    assert run("chat", "--max-tokens", "none").engine.params[0].max_tokens is None
    assert run("generate", "Hi").engine.params[0].max_tokens == 2048
    piped("Hi\n")
    assert run("chat", inputs=EchoInputs(defaults={"max_tokens": 7})).engine.params[0].max_tokens == 7


def test_a_model_without_template_cannot_chat(run, piped):
    piped("Hi\n")
    finished = run("chat", inputs=EchoInputs(template=False))
    assert finished.status == 2
    assert "no chat template" in finished.err
    assert finished.engine.is_shut_down


def test_several_answers_are_wrong_usage(run):
    finished = run("chat", "-n", "2")
    assert finished.status == 2
    assert "Leave it out" in finished.err


def test_an_interrupt_from_a_pipe_exits_with_130(run, piped):
    piped("interrupt\n")
    finished = run("chat")
    assert finished.status == 130
    assert finished.engine.aborted == ["turn-0"]


def test_a_message_may_have_several_lines(run, piped):
    piped('"""one\ntwo"""\n"""\nthree\n\nfour\n"""\n"""five\nsix')
    said = [message.rpartition("user:")[2] for message in [p["prompt"] for p in run("chat").engine.prompts]]
    assert said == ["one\ntwo", "three\n\nfour", "five\nsix"]


def test_the_last_answer_can_be_made_again(run, piped):
    piped("/regen\nHi\n/regen\nHo\n")
    finished = run("chat")
    assert finished.err == "jaxpaged chat: there is no answer yet.\n" and finished.status == 1
    prompts = [prompt["prompt"] for prompt in finished.engine.prompts]
    assert prompts == ["user:Hi", "user:Hi", "user:Hi|assistant:user:Hi|user:Ho"]


def test_parameters_can_be_set_shown_and_forgotten(run, piped):
    piped("/set temperature 0.5\n/set stop=a,b\n/set top-k 3\nHi\n/set\n/set temperature\nHi\n")
    finished = run("chat", "--top-k", "9")
    first, second = finished.engine.params
    assert (first.temperature, first.stop, first.top_k) == (0.5, ["a,b"], 3)
    assert second.temperature == 1.0 and 'stop ["a,b"]' in finished.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set temprature 1", "Did you mean 'temperature'"),
        ("/set temperature hot", "not a number"),
        ("/set top_p 7", "top_p"),
        ("/save", "name of a file"),
        ("/set n 2", "no parameter 'n' to set. See the sampling flags"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(run, piped, line, said):
    piped(f"{line}\nHi\n")
    finished = run("chat")
    assert finished.status == 1 and said in finished.err and finished.err.count("\n") == 1
    assert finished.out == "user:Hi\n"


def test_a_saved_conversation_is_read_by_generate_and_nothing_is_overwritten(run, piped, tmp_path):
    file, other = tmp_path / "chat.jsonl", tmp_path / "other"
    other.write_text("mine")
    piped(f"Hi\n/save {file}\nHo\n/save {file}\n/save {other}\n/bye\nnever\n")
    finished = run("chat", "--system", "S")
    assert finished.status == 0 and "exists already" in finished.err and other.read_text() == "mine"
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert run("generate", "--file", str(file)).status == 0


def test_an_answer_that_was_cut_says_how_to_get_a_longer_one(run, piped, monkeypatch):
    from jaxpaged.entrypoints.cli.conversation import Answer, Conversation

    class Cut:
        default_max_tokens = 2048

        def ask(self, messages, given, show):
            return Answer("text", "length", 2048)

    said = []
    monkeypatch.setattr("jaxpaged.entrypoints.cli.conversation.complain", lambda _, text: said.append(text))
    assert Conversation(Cut(), {}).say("Hi") and "cut after 2048 tokens" in said[0]
    assert Conversation(Cut(), {"max_tokens": 2048}).say("Hi") and len(said) == 1


# ---- a server


class Replies(http.server.BaseHTTPRequestHandler):
    """A server with OpenAI's API that says how long the conversation is; "refuse" and "break" in it do as they say."""

    asked: list

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "tiny"}]})

    def reply(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((body, self.headers.get("Authorization")))
        said = body["messages"][-1]["content"]
        if said == "refuse":
            return self.reply(400, {"error": {"message": "temperature is 9;\nnot possible."}})
        if said == "babble":
            return self.wfile.write(b"\0\0\x1e\x04\0\0\n")
        self.send_response(200)
        self.end_headers()
        for piece in ("You said ", *(said.split() if said.startswith("slowly") else [said])):
            self.chunk({"choices": [{"delta": {"content": piece}}]})
            time.sleep(0.03 * said.startswith("slowly"))
        if said == "break":
            return self.chunk({"error": {"message": "the engine died."}})
        self.chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.chunk({"choices": [], "usage": {"completion_tokens": 5}})
        self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, value):
        self.wfile.write(b": a comment\n\ndata: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture
def server():
    handler = type("Handler", (Replies,), {"asked": []})
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=made.serve_forever).start()
    yield f"http://127.0.0.1:{made.server_port}", handler.asked
    made.shutdown()
    made.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_chat_with_a_server_streams_what_it_answers(run, piped, server, suffix, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    url, asked = server
    piped("Hi\n/set top_k 3\nHo\n")
    finished = run("chat", "--url", url + suffix, "--temperature", "0.5")
    assert (finished.status, finished.out, finished.err) == (0, "You said Hi\nYou said Ho\n", "")
    first, second = asked
    assert first[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert second[0]["top_k"] == 3 and len(second[0]["messages"]) == 3 and first[1] == "Bearer k"
    assert finished.engine.prompts == [], "no engine was asked"


def test_a_server_that_refuses_or_breaks_off_is_reported_and_the_chat_goes_on(run, piped, server):
    piped("refuse\nbabble\nbreak\nHi\n")
    finished = run("chat", "big-model", "--url", server[0])
    assert finished.status == 1 and finished.out.splitlines()[-1] == "You said Hi"
    assert "the server answers 400: temperature is 9; not possible." in finished.err
    assert f"no answer from {server[0]}: what comes from there is no whole answer over HTTP" in finished.err
    assert "the server ended the answer: the engine died." in finished.err
    assert all(body["model"] == "big-model" for body, _ in server[1])


def test_the_speed_is_that_of_pieces_that_came_one_after_the_other(server):
    answers = ServerAnswers(server[0])
    texts = ("a b c", "slowly a b c d e f")
    at_once, slowly = (answers.ask([{"role": "user", "content": text}], {}, lambda piece: None) for text in texts)
    assert at_once.speed().startswith("5 tokens, the first after") and "tokens/s" in slowly.speed()


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        ([], None),
        ([1.0], None),
        ([1.0, 1.0001], None),
        ([1.0, 9.0], None),
        ([1.0, 1.01, 1.02, 1.03, 1.04], None),
        ([1.0, 1.0001, 1.0002, 1.0003, 1.0004, 2.0], None),
        ([1.0, 1.5, 2.0, 2.5, 3.0], 2.0),
    ],
)
def test_too_few_arrivals_tell_no_time(times, seconds):
    arrivals = Arrivals()
    for each in times:
        arrivals.add(each)
    assert arrivals.seconds() == seconds


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--url", "ftp://x"], 2, "must begin with http"),
        (["--url", "http://127.0.0.1:9"], 1, "Is the server running there?"),
        (["--url", "http://127.0.0.1:9", "--max-num-seqs", "3"], 2, "--max-num-seqs is an option of an engine"),
        (["--api-key", "k"], 2, "--api-key is for --url"),
    ],
)
def test_what_cannot_be_with_a_server_is_one_line(run, piped, arguments, status, said):
    piped("Hi\n")
    finished = run("chat", *arguments)
    assert finished.status == status and said in finished.err and finished.err.count("\n") == 1


def test_in_a_terminal_there_are_history_several_lines_and_the_speed(server, tmp_path):
    reader, terminal = pty.openpty()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    command = [sys.executable, "-m", "jaxpaged", "chat", "--url", server[0]]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=root) as chat:
        os.close(terminal)
        screen = ""

        def until(text):
            nonlocal screen
            while text not in screen:
                screen += os.read(reader, 4096).decode()
            before, _, screen = screen.partition(text)
            return before

        until("> ")
        os.write(reader, b"Hi\n")
        assert "You said Hi" in until("5 tokens")
        os.write(reader, b'"""a\nb"""\n')
        until("> ")
        until("You said a")
        os.write(reader, b"/bye\n")
        assert chat.wait(timeout=60) == 0
    os.close(reader)
    assert server[1][1][0]["messages"][-1]["content"] == "a\nb"
    history = tmp_path / "jaxpaged" / "chat_history"
    assert "Hi" in history.read_text() and history.stat().st_mode & 0o077 == 0
