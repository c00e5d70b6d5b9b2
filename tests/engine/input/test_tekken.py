"""A folder with Mistral's tekken.json has the tokens that mistral-common makes: see scripts/update_gguf_goldens.py."""

import json
from pathlib import Path

import pytest

from jaxpaged.engine.input.tokenizer import load_tokenizer
from jaxpaged.errors import CheckpointError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/formats/tekken.json").read_text(encoding="utf-8"))
FILE = GOLDEN["file"]


def loaded(folder, file):
    (folder / "tekken.json").write_text(json.dumps(file))
    return load_tokenizer(folder)


def test_tokens_are_those_of_mistral_common(tmp_path):
    tokenizer = loaded(tmp_path, FILE)
    for text, expected in zip(GOLDEN["texts"], GOLDEN["tokens"], strict=True):
        if "<s>" not in text:
            assert tokenizer.encode(text) == expected, text
            assert tokenizer.decode(expected) == text


def test_special_tokens_in_a_text_are_tokens_as_chat_templates_write_them(tmp_path):
    tokenizer = loaded(tmp_path, FILE)
    assert tokenizer.encode("<s>[INST]x[/INST]", add_special_tokens=False)[:2] == [1, 3]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 721)
    assert tokenizer.decode([3, 23, 4]) == ""


def test_files_that_do_not_name_their_special_tokens_have_those_of_the_first_ones(tmp_path):
    tokenizer = loaded(tmp_path, {**FILE, "special_tokens": None})
    assert tokenizer.encode("[TOOL_CALLS]<pad>", add_special_tokens=False) == [9, 11]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": []},
        {"config": {**FILE["config"], "default_vocab_size": 2000}},
        {"vocab": [{"rank": 0}]},
        {"vocab": [FILE["vocab"][0]] * 1000},
        {"special_tokens": [{"rank": 24, "token_str": "x"}]},
        {"special_tokens": [1]},
        {"vocab": 5},
        {"config": {**FILE["config"], "pattern": "("}},
        {"config": {**FILE["config"], "default_num_special_tokens": 10**11, "default_vocab_size": 10**11 + 1000}},
        {"special_tokens": [{"rank": 0, "token_str": None}]},
        {"special_tokens": [{"rank": i, "token_str": "x"} for i in range(2)]},
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(changes, tmp_path):
    with pytest.raises(CheckpointError, match=r"tekken\.json .*Fetch the file again"):
        loaded(tmp_path, {**FILE, **changes})
