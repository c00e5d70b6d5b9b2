"""Suggestions are made where a name is nearly right, and nowhere else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpaged
from jaxpaged.config import EngineConfig, all_options
from jaxpaged.entrypoints.cli import command_line
from jaxpaged.errors import ConfigError, did_you_mean, num_edits

OPTIONS = [option.name for _, option in all_options()]


def flags_of(command):
    parser = next(a for a in command_line()._actions if a.dest == "command").choices[command]
    return list(parser._option_string_actions)


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("--max-tokns", ["--max-tokens", "--min-tokens"], "--max-tokens"),
        ("/claer", ["/help", "/clear"], "/clear"),
        ("max_seqs", OPTIONS, "max_num_seqs"),
        ("--enable-prefix", ["--enable-prefix-caching", "--enable-chunked-prefill"], "--enable-prefix-caching"),
        ("maxNumSeqs", OPTIONS, "max_num_seqs"),
        ("max-num-seqs", OPTIONS, "max_num_seqs"),
        ("float23", ["bfloat16", "float16", "float32"], "float32"),
        ("v6", ["v5e", "v6e", "h100"], "v6e"),
    ],
)
def test_a_slip_is_recognised(name, known, meant):
    assert did_you_mean(name, known) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("--trust-remote-code", ["--trust-request-chat-template", "--host"]),
        ("--lora-modules", ["--model", "--seed", "--logprobs", "--max-logprobs"]),
        ("-x", ["-n", "-tp", "-m"]),
        ("gptq", ["int8", "auto"]),
        ("", OPTIONS),
        ("temperature", OPTIONS),
    ],
)
def test_what_is_not_near_is_not_suggested(name, known):
    assert did_you_mean(name, known) == ""


VLLM_ONLY = [
    "--data-parallel-size",
    "--pipeline-parallel-size",
    "--enable-lora",
    "--kv-transfer-config",
    "--speculative-config",
    "--limit-mm-per-prompt",
    "--mm-processor-kwargs",
    "--swap-space",
    "--cpu-offload-gb",
    "--max-lora-rank",
    "--distributed-executor-backend",
    "--guided-decoding-backend",
]


@pytest.mark.parametrize("flag", VLLM_ONLY)
def test_flags_that_we_do_not_have_are_not_taken_for_others(flag):
    known = flags_of("serve")
    assert flag in known or did_you_mean(flag, known) == ""


@given(st.sampled_from(OPTIONS), st.data())
def test_one_wrong_letter_in_a_name_still_finds_it(name, data):
    place = data.draw(st.integers(1, len(name) - 1))
    letter = data.draw(st.sampled_from("abcxyz"))
    form = data.draw(st.sampled_from(["replace", "insert", "drop", "swap"]))
    if form == "swap":
        wrong = name[: place - 1] + name[place] + name[place - 1] + name[place + 1 :]
    else:
        wrong = name[:place] + ("" if form == "drop" else letter) + name[place + (form != "insert") :]
    if wrong not in OPTIONS and len(name) > 5:
        suggested = did_you_mean(wrong, OPTIONS)
        assert suggested
        meant = suggested.removeprefix(" Did you mean '").removesuffix("'?")
        assert num_edits(wrong, meant) <= num_edits(wrong, name) == (0 if wrong == name else 1)


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_the_number_of_edits_is_symmetrical_and_zero_for_equal_names_only(a, b):
    assert num_edits(a, b) == num_edits(b, a) >= abs(len(a) - len(b))
    assert (num_edits(a, b) == 0) == (a == b)
    assert num_edits(a, b) <= max(len(a), len(b))


@pytest.mark.parametrize(
    ("made", "wrong", "meant"),
    [
        (jaxpaged.SamplingParams, "temprature", "temperature"),
        (jaxpaged.SamplingParams, "max_token", "max_tokens"),
        (jaxpaged.BeamSearchParams, "beam_widht", "beam_width"),
        (jaxpaged.PoolingParams, "dimension", "dimensions"),
        (jaxpaged.StructuredOutputsParams, "chioce", "choice"),
    ],
)
def test_a_keyword_that_is_nearly_right_is_suggested(made, wrong, meant):
    with pytest.raises(TypeError, match=f"{made.__name__} has no parameter '{wrong}'. Did you mean '{meant}'"):
        made(**{wrong: 1})
    with pytest.raises(TypeError, match="has no parameter 'zzzzzzzz'.$"):
        made(zzzzzzzz=1)


@pytest.mark.parametrize("options", [{"trust_remot_code": False}, {"max_num_seq": 4}, {"tensor_paralel_size": 1}])
def test_an_option_that_is_nearly_right_is_suggested_vllms_too(options):
    with pytest.raises(ConfigError, match="unknown option .* Did you mean"):
        EngineConfig.from_options(**options)
    with pytest.raises(ConfigError, match="unknown option .* Did you mean"):
        jaxpaged.EngineArgs(**options)
    with pytest.raises(ConfigError, match="unknown option .* Did you mean"):
        jaxpaged.LLM(**options)


def test_a_public_name_that_is_nearly_right_is_suggested():
    with pytest.raises(AttributeError, match="no attribute 'SamplingParam'. Did you mean 'SamplingParams'"):
        jaxpaged.SamplingParam  # noqa: B018
    with pytest.raises(AttributeError, match="It has LLM, "):
        jaxpaged.zzzzzzzz  # noqa: B018


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        (["generat"], "generate"),
        (["srve"], "serve"),
        (["bench", "througput"], "throughput"),
        (["bench", "serve", "--dataset-name", "randm"], "random"),
        (["generate", "--temprature", "1"], "--temperature"),
        (["serve", "--trust-remot-code"], "--trust-remote-code"),
    ],
)
def test_a_word_of_a_command_line_that_is_nearly_right_is_suggested(line, meant, capsys):
    with pytest.raises(SystemExit):
        command_line().parse_args(line)
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err
