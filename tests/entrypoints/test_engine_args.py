import dataclasses

import pytest

from jaxpaged import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
from jaxpaged.config import EngineConfig, all_options
from jaxpaged.config.vllm_options import FOREIGN_OPTIONS
from jaxpaged.errors import ConfigError


def parsed(*words, **defaults):
    parser = FlexibleArgumentParser(description="a test")
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    return parser.parse_args(list(words))


def test_without_arguments_it_is_the_default_configuration():
    assert EngineArgs().create_engine_config() == EngineConfig()
    assert EngineArgs(model="a").model == "a"
    assert EngineArgs("a").create_engine_config().model.model == "a"


def test_every_option_is_a_field_ours_and_vllms():
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    assert names == {f.name for _, f in all_options()} | set(FOREIGN_OPTIONS)


def test_it_can_be_taken_apart_and_put_together():
    args = EngineArgs(model="a", max_num_seqs=4, enforce_eager=False, hf_overrides={})
    assert EngineConfig.from_options(**dataclasses.asdict(args)) == args.create_engine_config()
    assert dataclasses.replace(args, max_num_seqs=5).max_num_seqs == 5
    assert dataclasses.replace(args) == args != EngineArgs(model="a")
    assert vars(args)["max_num_seqs"] == 4


def test_defaults_are_not_shared():
    EngineArgs().pooler_config["pooling_type"] = "MEAN"
    assert EngineArgs().pooler_config == {}


def test_unknown_names_and_wrong_values_are_refused():
    with pytest.raises(ConfigError, match="unknown option 'max_num_seq'. Did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=4)
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        EngineArgs(max_num_seqs=0).create_engine_config()


def test_parsed_arguments_hold_every_option():
    assert vars(parsed()) == vars(EngineArgs())


def test_flags_reach_the_engine_however_they_are_spelled():
    args = parsed("--max-num-seqs", "4", "--max_model_len=1k", "--seed", "7", "--no-enable-prefix-caching", "-tp", "1")
    options = EngineArgs.from_cli_args(args)
    assert (options.max_num_seqs, options.max_model_len, options.seed, options.enable_prefix_caching) == (
        4,
        1000,
        7,
        False,
    )
    assert EngineConfig.from_options(**vars(args)) == options.create_engine_config()
    assert isinstance(AsyncEngineArgs.from_cli_args(args), AsyncEngineArgs)


def test_a_script_may_set_other_defaults_and_flags_of_its_own():
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="m", runner="pooling")
    parser.add_argument("--max-tokens", type=int)
    args = vars(parser.parse_args(["--max_tokens", "3"]))
    assert args.pop("max_tokens") == 3
    assert (args["model"], args["runner"]) == ("m", "pooling")
    assert EngineConfig.from_options(**args).model.model == "m"


def test_values_with_underscores_stay_as_they_are():
    assert parsed("--model", "a_b", "--tokenizer=c_d").tokenizer == "c_d"
    assert parsed("--model", "a_b").model == "a_b"


def test_a_wrong_flag_is_named(capsys):
    with pytest.raises(SystemExit):
        parsed("--max-num-seq", "3")
    assert "--max-num-seqs" in capsys.readouterr().err
