"""`--lora`: what it asks of an engine, and for which prompts."""

import json

import pytest

from jaxpaged.messages import LoRARequest


def adapter(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8, **config}))
    return str(folder)


def test_every_prompt_has_the_adapter_and_without_the_flag_none(run, tmp_path):
    path = adapter(tmp_path / "sql")
    finished = run("generate", "--lora", f"words={path}", "Hi", "Ho")
    assert finished.engine.loras == [LoRARequest("words", 1, path)] * 2
    assert finished.options == {"enable_lora": True, "max_lora_rank": 8}
    plain = run("generate", "Hi")
    assert plain.engine.loras == [None] and plain.options == {}


def test_a_chat_has_it_in_every_turn(run, piped, tmp_path):
    path = adapter(tmp_path / "sql")
    piped("Hi\nHo\n")
    assert run("chat", "--lora", path).engine.loras == [LoRARequest("sql", 1, path)] * 2


@pytest.mark.parametrize(
    ("config", "flags", "rank"),
    [
        ({"r": 1}, [], 8),
        ({"r": 9}, [], 16),
        ({"r": 4, "rank_pattern": {"q_proj": 100}}, [], 128),
        ({"r": 64}, ["--max-lora-rank", "32"], 32),
        ({"r": 5000}, [], None),
        ({"r": "8"}, [], None),
        ({"r": None}, [], None),
    ],
)
def test_the_engine_has_room_for_its_rank_unless_told_otherwise(run, tmp_path, config, flags, rank):
    options = run("generate", "--lora", adapter(tmp_path / "a", **config), *flags, "Hi").options
    assert options.pop("max_lora_rank", None) == rank and options == {"enable_lora": True}


@pytest.mark.parametrize(
    ("config", "tables"),
    [
        ({"target_modules": ["q_proj", "model.embed_tokens"]}, ["embed_tokens"]),
        ({"target_modules": ["lm_head"], "ensure_weight_tying": True}, ["embed_tokens", "lm_head"]),
        ({"target_modules": ["q_proj"], "ensure_weight_tying": True}, []),
        ({"target_modules": "all-linear"}, []),
        ({"target_modules": [7]}, []),
    ],
)
def test_the_engine_has_adapters_of_tables_where_this_one_changes_them(run, tmp_path, config, tables):
    options = run("generate", "--lora", adapter(tmp_path / "a", **config), "Hi").options
    assert options.get("lora_target_modules") == (("all-linear", *tables) if tables else None)


@pytest.mark.parametrize("given", ["", "a=", "=/a"])
def test_what_names_no_adapter_is_wrong_usage(run, given):
    finished = run("generate", "--lora", given, "Hi")
    assert finished.status == 2 and "--lora is" in finished.err and "it must be NAME=PATH" in finished.err


@pytest.mark.parametrize(
    "words", [["generate", "Hi", "--server", "localhost:1"], ["chat", "--url", "http://localhost:1"]]
)
def test_a_server_has_adapters_of_its_own(run, piped, words):
    piped("")
    finished = run(*words, "--lora", "a=/a")
    assert finished.status == 2 and "--lora is an option of an engine" in finished.err
