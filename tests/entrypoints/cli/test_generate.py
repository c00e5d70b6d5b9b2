"""`jaxpaged generate` with an engine that echoes: what goes in, what comes out, and what is said when it goes wrong."""

import json

import pytest

from tests.entrypoints.cli.conftest import EchoInputs


def json_lines(finished):
    return [json.loads(line) for line in finished.out.splitlines()]


# ---- prompts


def test_one_prompt_prints_its_text_alone(run):
    finished = run("generate", "--raw", "Hello there")
    assert (finished.status, finished.out, finished.err) == (0, "Hello there\n", "")
    assert finished.engine.is_shut_down


def test_several_prompts_are_headed_by_themselves_in_their_order(run):
    finished = run("generate", "--raw", "a longer first prompt", "two")
    assert finished.out == "> a longer first prompt\na longer first prompt\n\n> two\ntwo\n"


def test_a_chat_model_gets_its_template_and_raw_leaves_it_out(run):
    assert run("generate", "Hi").engine.prompts == [{"prompt": "user:Hi"}]
    assert run("generate", "Hi", "--system", "Be brief").engine.prompts == [{"prompt": "system:Be brief|user:Hi"}]
    assert run("generate", "Hi", "--raw").engine.prompts == ["Hi"]


def test_a_model_without_template_continues_the_text(run):
    inputs = EchoInputs(template=False)
    assert run("generate", "Hi", inputs=inputs).engine.prompts == ["Hi"]
    refused = run("generate", "Hi", "--system", "Be brief", inputs=inputs)
    assert refused.status == 1
    assert "no chat template" in refused.err


def test_a_file_holds_a_prompt_a_line_and_empty_lines_are_skipped(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo words\r\n\u2028three\n", encoding="utf-8")
    assert run("generate", "--raw", "--file", str(path)).engine.prompts == ["one", "two words", "\u2028three"]


def test_arguments_come_before_the_file(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("second")
    assert run("generate", "--raw", "first", "--file", str(path)).engine.prompts == ["first", "second"]


def test_a_file_may_hold_json_lines(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "text"}, {"prompt": [1, 2, 3]}, {"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    finished = run("generate", "--raw", "--file", str(path))
    assert finished.engine.prompts == ["text", {"prompt_token_ids": [1, 2, 3]}, {"prompt": "user:hi"}]


def test_standard_input_is_read_when_there_is_no_prompt(run, piped):
    piped("from a pipe\nand another\n")
    assert run("generate", "--raw").engine.prompts == ["from a pipe", "and another"]


def test_a_text_that_begins_like_json_is_a_text(run, piped):
    piped('{"name": "Ann"} as YAML\n{"name": "Bob"}\n')
    assert run("generate", "--raw").engine.prompts == ['{"name": "Ann"} as YAML', '{"name": "Bob"}']


# ---- results


def test_json_has_a_line_for_every_prompt_in_order(run):
    finished = run("generate", "--raw", "--json", "a longer first prompt", "two")
    first, second = json_lines(finished)
    assert (first["index"], first["prompt"], first["text"]) == (0, "a longer first prompt", "a longer first prompt")
    assert second == {
        "index": 1,
        "sequence": 0,
        "prompt": "two",
        "text": "two",
        "token_ids": [116, 119, 111],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 2,
        "error": None,
    }


def test_json_reports_log_probabilities_when_asked_for(run):
    finished = run("generate", "--raw", "--json", "--logprobs", "1", "--prompt-logprobs", "1", "a")
    (line,) = json_lines(finished)
    assert line["logprobs"] == [
        {
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": None, "rank": 9, "decoded_token": "?"},
        }
    ]
    assert line["cumulative_logprob"] == -0.5
    assert line["prompt_logprobs"] == [None, {"5": {"logprob": -1.5, "rank": 2, "decoded_token": "x"}}]


def test_n_answers_become_n_lines(run):
    finished = run("generate", "--raw", "-n", "2", "abcdef")
    assert finished.out == "[0] abcdef\n[1] abcdef\n"
    lines = json_lines(run("generate", "--raw", "--json", "-n", "2", "ab"))
    assert [(line["index"], line["sequence"]) for line in lines] == [(0, 0), (0, 1)]


def test_text_is_written_as_it_is_generated(run, monkeypatch):
    from tests.entrypoints.cli.conftest import EchoEngine

    pieces = []
    step = EchoEngine.step
    monkeypatch.setattr(EchoEngine, "step", lambda self: pieces.append(written()) or step(self))
    written = watch_standard_output(monkeypatch)
    run("generate", "--raw", "abcdefgh")
    assert pieces == ["", "abc", "abcdef"]


def watch_standard_output(monkeypatch):
    """A function that tells what has been written so far."""
    import io
    import sys

    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    return lambda: stream.buffer.getvalue().decode()


def test_stats_go_to_standard_error(run):
    finished = run("generate", "--raw", "--stats", "abcdef")
    assert finished.out == "abcdef\n"
    lines = dict(line.split(maxsplit=1) for line in finished.err.splitlines())
    assert lines["requests"].startswith("1 in ")
    assert lines["prefill"].startswith("4 tokens")
    assert lines["cache"] == "2 of 6 prompt tokens were in the prefix cache"
    assert lines["decode"].startswith("5 tokens")
    assert lines["steps"].startswith("4; by tokens they were padded to: 3 of 16, 1 of 32; ")
    assert lines["steps"].endswith("; 5.0 tokens of a step were padding, 25% of all")
    assert lines["programs"] == "5 of 6 ready, 1.2 s of compiling, 0 recompiles"


def test_while_programs_compile_padding_is_explained_and_not_a_share_that_alarms(run, monkeypatch):
    from tests.entrypoints.cli.conftest import EchoEngine

    monkeypatch.setattr(EchoEngine, "num_ready", 3)
    (line,) = [line for line in run("generate", "--raw", "--stats", "a").err.splitlines() if line.startswith("steps")]
    assert "still being compiled" in line and "%" not in line


# ---- sampling parameters


def test_flags_win_over_the_models_defaults(run):
    inputs = EchoInputs(defaults={"temperature": 0.5, "top_k": 9, "max_tokens": 77})
    (params,) = run("generate", "Hi", "--temperature", "0.25", "--seed", "3", inputs=inputs).engine.params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.25, 9, 77, 3)


def test_an_answer_has_a_length_that_one_can_wait_for_and_raw_text_ends_after_a_page(run):
    assert run("generate", "Hi").engine.params[0].max_tokens == 2048
    assert run("generate", "--raw", "Hi").engine.params[0].max_tokens == 256
    assert run("generate", "--raw", "Hi", "--max-tokens", "none").engine.params[0].max_tokens is None
    assert run("generate", "--raw", "abcdef", "--max-tokens", "2").out == "ab\n"


def test_answers_that_were_cut_at_a_length_that_nobody_asked_for_are_remarked_on_once(run):
    long = "x" * 3000
    finished = run("generate", long, "short", long)
    assert finished.status == 0
    assert finished.err == (
        "jaxpaged generate: 2 answers were cut after 2048 tokens. For longer ones: --max-tokens N, or none for as many "
        "as the context holds.\n"
    )
    assert "1 answer was cut after 256 tokens" in run("generate", "--raw", "--json", "x" * 300).err
    assert run("generate", "--max-tokens", "7", long).err == ""
    assert run("generate", long, inputs=EchoInputs(defaults={"max_tokens": 50})).err == ""


def test_the_seed_is_that_of_the_requests(run):
    finished = run("generate", "Hi", "--seed", "5")
    assert finished.options == {}
    assert finished.engine.params[0].seed == 5


# ---- errors


def test_a_refused_prompt_is_named_and_the_others_finish(run):
    finished = run("generate", "--raw", "one", "refuse me", "three")
    assert finished.status == 1
    assert finished.out == "> one\none\n\n> three\nthree\n"
    assert finished.err == ("jaxpaged generate: prompt 1 ('refuse me'): the prompt 'refuse me' is refused.\n")


def test_a_prompt_that_fails_while_running_is_named_and_the_others_finish(run):
    finished = run("generate", "--raw", "--json", "one", "fail me", "three")
    assert finished.status == 1
    assert [line["error"] for line in json_lines(finished)] == [None, "its logits are not numbers.", None]
    assert "prompt 1 ('fail me'): its logits are not numbers." in finished.err


def test_an_empty_prompt_is_refused_alone(run):
    finished = run("generate", "", "two")
    assert finished.status == 1
    assert "prompt 0 (''): the prompt is empty" in finished.err
    assert "two" in finished.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{broken", "the line is not JSON"),
        ('{"promt": "x"}', "unknown key 'promt'. Did you mean 'prompt'?"),
        ('{"prompt": "x", "messages": []}', "either prompt or messages"),
        ('{"prompt": 5}', "prompt is 5; it must be a text"),
        ('{"messages": []}', "messages is []"),
        ("[1]", "the line holds [1]"),
    ],
)
def test_a_bad_json_line_is_refused_alone(run, piped, line, said):
    piped('{"prompt": "good"}\n' + line)
    finished = run("generate", "--raw", "--json")
    good, bad = json_lines(finished)
    assert finished.status == 1
    assert good["text"] == "good"
    assert said in bad["error"]
    assert "prompt 1" in finished.err


def test_a_damaged_first_line_does_not_turn_json_lines_into_plain_text(run, piped):
    piped('{"prompt": "damaged"\n{"prompt": "good"}')
    finished = run("generate", "--raw", "--json")
    bad, good = json_lines(finished)
    assert finished.status == 1
    assert "the line is not JSON" in bad["error"]
    assert good["text"] == "good"


def test_a_broken_engine_is_one_line_and_status_1(run):
    finished = run("generate", "crash")
    assert finished.status == 1
    assert finished.err == "jaxpaged generate: error: the step failed. It will not work again.\n"
    assert finished.engine.is_shut_down


def test_debug_shows_the_traceback(run):
    from jaxpaged.errors import EngineError

    with pytest.raises(EngineError):
        run("generate", "--debug", "crash")


def test_an_interrupt_aborts_everything_and_exits_with_130(run):
    finished = run("generate", "--raw", "interrupt", "two")
    assert finished.status == 130
    assert finished.engine.aborted == ["0", "1"]
    assert finished.engine.is_shut_down


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1", "Hi"], "temperature is -1.0; it must be at least 0"),
        (["--temperature", "nan", "Hi"], "temperature is nan; it must be finite"),
        (["--file", "/nowhere/at/all"], "cannot read /nowhere/at/all: No such file or directory"),
        (["--config", "/nowhere/at/all", "Hi"], "cannot read /nowhere/at/all"),
        (["--raw", "--system", "x", "Hi"], "--system needs the chat template"),
        (["--max-tokns", "3", "Hi"], "unknown argument '--max-tokns'. Did you mean '--max-tokens'?"),
        (["--max-tokens", "many", "Hi"], "'many' is not a whole number"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(run, arguments, said):
    finished = run("generate", *arguments)
    assert finished.status == 2
    assert said in finished.err
    assert finished.err.count("\n") == 1
    assert finished.out == ""


def test_no_prompt_at_all_is_wrong_usage(run, piped):
    piped("\n")
    finished = run("generate")
    assert finished.status == 2
    assert "there is no prompt in standard input" in finished.err


def test_input_that_is_no_text_is_wrong_usage(run, piped):
    piped(b"\xff\xfe\x00")
    finished = run("generate")
    assert finished.status == 2
    assert "is not UTF-8" in finished.err


# ---- structured outputs


def test_a_schema_in_a_file_and_a_shape_on_the_command_line_reach_every_request(run, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    (params,) = run("generate", "--raw", "--json-schema", str(path), "one").engine.params
    assert params.structured_outputs.json == '{"type": "object"}'
    (params,) = run("generate", "--raw", "--structured-outputs", '{"choice": ["a", "b"]}', "one").engine.params
    assert params.structured_outputs.choice == ["a", "b"]


def test_a_schema_that_cannot_be_read_is_refused(run, tmp_path):
    refused = run("generate", "--raw", "--json-schema", str(tmp_path / "nowhere.json"), "one")
    assert refused.status == 2 and "No such file" in refused.err
    both = run("generate", "--raw", "--json-schema", "x", "--structured-outputs", '{"regex": "a"}', "one")
    assert both.status == 2 and "Leave one of them out" in both.err


def test_a_prompt_file_is_one_prompt_with_its_lines(run, piped, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\nthree\r\n")
    (tmp_path / "lines.txt").write_text("x\ny\n")
    finished = run(
        "generate", "--raw", "zero", "--prompt-file", str(tmp_path / "a.txt"), "--file", str(tmp_path / "lines.txt")
    )
    assert finished.engine.prompts == ["zero", "one\ntwo\n\nthree", "x", "y"]
    piped('{"prompt": "no JSON here"}\nmore\n')
    assert run("generate", "--raw", "--prompt-file", "-").engine.prompts == ['{"prompt": "no JSON here"}\nmore']
    piped("a\nb\n")
    assert run("generate", "--raw").engine.prompts == ["a", "b"]


def test_standard_input_cannot_be_two_things(run, piped):
    piped("a\n")
    finished = run("generate", "--prompt-file", "-", "--file", "-")
    assert finished.status == 2 and "given twice" in finished.err


def test_a_prompt_file_that_is_not_there_is_named_with_its_flag(run):
    finished = run("generate", "--prompt-file", "/no/such/file")
    assert finished.status == 2 and "--prompt-file" in finished.err


def test_a_prompt_that_looks_like_a_model_is_remarked_on(run):
    finished = run("generate", "Qwen/Qwen3-0.6B", "Hi")
    assert len(finished.engine.prompts) == 2
    assert "Qwen/Qwen3-0.6B is taken as a prompt; a model is given with -m Qwen/Qwen3-0.6B" in finished.err
    assert run("generate", "-m", "a/b", "c/d").err == "" == run("generate", "and / or").err
