"""Flags made from declarations: every option has one, texts become values, and a YAML file speaks below the flags."""

import argparse

import pytest

from jaxpaged.config import EngineConfig, all_options
from jaxpaged.entrypoints.argument_parser import Parser
from jaxpaged.entrypoints.cli import flags
from jaxpaged.entrypoints.cli.flags import read_config_file
from jaxpaged.entrypoints.option_flags import FLAGS_OF_THEIR_OWN, add_engine_flags, whole_number
from jaxpaged.errors import ConfigError
from jaxpaged.sampling_params import FILLED_IN, SAMPLING_HELP, SamplingParams


@pytest.fixture
def parser():
    made = Parser(prog="test")
    flags.add_sampling_flags(made)
    add_engine_flags(made)
    return made


def test_every_option_of_the_engine_has_its_flag(parser):
    known = parser._option_string_actions
    assert all("--" + option.name.replace("_", "-") in known for _, option in all_options())


def test_the_engines_own_seed_has_a_flag_of_its_own_beside_that_of_the_requests(options):
    assert options("seed: 3\n", "--seed", "4") == {"seed": 3}
    assert options("seed: 3\n", "--seed", "4", "--engine-seed", "5") == {"seed": 5}


def test_where_requests_have_no_flags_the_engines_seed_has_vllms_name():
    parser = Parser(prog="test")
    add_engine_flags(parser)
    for flag in ("--seed", "--engine-seed"):
        assert flags.engine_options(parser.parse_args([flag, "7"])) == {"seed": 7}


def test_every_option_reaches_the_engine_from_its_flag_whatever_else_is_there(parser):
    """No flag of the command line is only a sampling parameter's where an option has the same name."""
    for _, option in all_options():
        flag = "--" + FLAGS_OF_THEIR_OWN.get(option.name, option.name).replace("_", "-")
        given = parser._option_string_actions[flag]
        value = object()
        assert flags.engine_options(argparse.Namespace(config=None, **{given.dest: value})) == {option.name: value}


def test_every_sampling_parameter_has_its_flag_and_help():
    fields = set(SamplingParams.__struct_fields__)
    assert set(SAMPLING_HELP) == fields - {"output_kind", "stream_interval", *FILLED_IN}


def test_flags_that_are_not_given_leave_no_trace(parser):
    args = parser.parse_args([])
    assert flags.engine_options(args) == {}
    assert flags.sampling_options(args) == {}


def test_texts_become_values_of_the_declared_types(parser):
    args = parser.parse_args(
        [
            "--max-num-seqs",
            "4k",
            "--gpu-memory-utilization",
            "0.5",
            "--no-enable-prefix-caching",
            "--token-buckets",
            "16, 32,64",
            "--override-generation-config",
            '{"top_k": 3}',
            "-tp",
            "2",
            "--dtype",
            "float32",
            "--model",
            "none",
        ]
    )
    assert flags.engine_options(args) == {
        "max_num_seqs": 4000,
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False,
        "token_buckets": (16, 32, 64),
        "override_generation_config": {"top_k": 3},
        "tensor_parallel_size": 2,
        "dtype": "float32",
        "model": "none",
    }
    EngineConfig.from_options(**flags.engine_options(args))


def test_sampling_texts_become_values_that_sampling_params_take(parser):
    args = parser.parse_args(
        [
            "--stop",
            "a,b",
            "--stop",
            "\n",
            "--stop-token-ids",
            "1,2",
            "--logit-bias",
            '{"5": -1.5}',
            "--ignore-eos",
            "--max-tokens",
            "none",
            "--bad-words",
            "no",
            "--logprobs",
            "-1",
            "--top-p",
            "0.5",
            "--seed=-1",
        ]
    )
    params = SamplingParams(**flags.sampling_options(args))
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["a,b", "\n"], [1, 2], ["no"])
    assert (params.logit_bias, params.ignore_eos, params.max_tokens) == ({5: -1.5}, True, None)
    assert (params.logprobs, params.top_p, params.seed) == (-1, 0.5, -1)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-1", -1), ("4k", 4000), ("4K", 4096), ("32k", 32000), ("1m", 10**6), ("2G", 2**31), ("1.5k", 1500)],
)
def test_whole_numbers_may_carry_a_suffix(text, value):
    assert whole_number(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "4 k", "0x10", "1e3", "4kk", "١٢x"])
def test_other_texts_are_no_whole_numbers(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        whole_number(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logit-bias", "[1]"],
        ["--logit-bias", "{"],
        ["--token-buckets", "16,x"],
        ["--gpu-memory-utilization", "half"],
        ["--enable-prefix"],
    ],
)
def test_wrong_values_end_with_status_2_and_one_line(parser, capsys, arguments):
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- YAML files


@pytest.fixture
def options(parser, tmp_path):
    """`options(yaml_text, *flags)` -> the engine's options."""

    def read(text, *arguments):
        path = tmp_path / "engine.yaml"
        path.write_text(text, encoding="utf-8")
        return flags.engine_options(parser.parse_args(["--config", str(path), *arguments]))

    return read


def test_flags_win_over_the_file(options):
    read = options("max_num_seqs: 8\nblock-size: 16\n", "--max-num-seqs", "4")
    assert read == {"max_num_seqs": 4, "block_size": 16}


def test_values_of_a_file_get_the_declared_types(options):
    read = options("max-model-len: 32k\ntoken_buckets: [16, 32]\nenable_prefix_caching: 'false'\nmax_num_seqs: null\n")
    assert read == {
        "max_model_len": 32000,
        "token_buckets": (16, 32),
        "enable_prefix_caching": False,
        "max_num_seqs": None,
    }
    EngineConfig.from_options(**read)


def test_an_empty_file_changes_nothing(options):
    assert options("# nothing yet\n") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_num_seq: 8\n", "unknown option 'max_num_seq' in .*engine.yaml. Did you mean 'max_num_seqs'?"),
        ("temperature: 1.0\n", "unknown option 'temperature'"),
        ("- a\n- b\n", "holds a list"),
        ("a: [\n", "is not YAML"),
        ("max_num_seqs: lots\n", "max_num_seqs in .*: 'lots' is not a whole number"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(options, text, said):
    with pytest.raises(ConfigError, match=said):
        options(text)


def test_recipes_that_ship_with_the_project_are_valid(parser):
    from pathlib import Path

    recipes = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        EngineConfig.from_options(**read_config_file(str(recipe)))
