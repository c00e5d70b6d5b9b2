"""The commands with the real engine and the embedded model; the other tests use one that echoes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpaged.engine.llm_engine import LLMEngine
from jaxpaged.entrypoints.cli.engine import Engine

ROOT = Path(__file__).parents[3]


# The programs of servers in tests/end_to_end.
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--token-buckets", "2,8,64")


def command(*arguments, stdin=""):
    line = [sys.executable, "-m", "jaxpaged", *arguments, "--temperature", "0", *SMALL]
    return subprocess.run(line, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=500, check=False)


def test_the_real_engine_has_what_commands_use():
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert methods
    assert methods <= set(dir(LLMEngine))


@pytest.mark.slow
def test_generate_answers_with_the_embedded_model_and_refuses_one_prompt_alone():
    lines = [{"prompt": "What is the capital of Portugal?"}, {"prompt": [10**6]}, {"prompt": "What is 27 + 45?"}]
    done = command("generate", "--json", "--stats", stdin="\n".join(map(json.dumps, lines)))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert "Lisbon" in answers[0]["text"]
    assert "vocabulary" in answers[1]["error"]
    assert "72" in answers[2]["text"]
    assert "prompt 1" in done.stderr
    assert "0 recompiles" in done.stderr


@pytest.mark.slow
def test_chat_answers_every_line_of_a_pipe():
    done = command("chat", stdin="What is the capital of Peru?\nWhat is 12 + 30?\n")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "Lima" in first
    assert "42" in second
