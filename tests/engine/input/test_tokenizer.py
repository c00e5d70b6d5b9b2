import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jaxpaged.engine.input.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from jaxpaged.errors import CheckpointError
from tests.engine.small_tokenizer import CONFIG, make_backend, make_tokenizer

TOKENIZER = make_tokenizer()


def write_folder(folder, config=None):
    make_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


@given(st.text())
def test_decoding_gives_back_what_was_encoded(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    if not any(special in text for special in TOKENIZER.added_tokens.values()):
        assert TOKENIZER.decode(ids) == text


def test_ids_are_those_of_transformers(tmp_path):
    folder = write_folder(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in ("the cat <turn> sat", "  two spaces", "äöü 😀", "<bos>the<eos>"):
        assert ours.encode(text) == theirs.encode(text)
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, False) == theirs.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_tokenizer_file_decides_which_ends_are_added(tmp_path, add_bos):
    folder = write_folder(tmp_path, {**CONFIG, "add_bos_token": add_bos})
    ids = load_tokenizer(folder).encode("the cat")
    assert ids[0] == 1
    assert ids == AutoTokenizer.from_pretrained(folder).encode("the cat")


def test_named_tokens_may_be_objects_or_come_from_the_special_tokens_map(tmp_path):
    folder = write_folder(tmp_path, {"eos_token": {"content": "<end>", "lstrip": False}})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.named_tokens == {"bos_token": "<bos>", "eos_token": "<end>"}
    assert tokenizer.eos_token_id == tokenizer.backend.token_to_id("<end>")


def test_a_named_token_without_an_id_does_not_grow_the_vocabulary():
    size = make_tokenizer().vocab_size
    tokenizer = Tokenizer(make_backend(), {**CONFIG, "pad_token": "[NEW]"})
    assert tokenizer.vocab_size == size == tokenizer.backend.get_vocab_size()


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers():
    check_vocabulary(TOKENIZER, TOKENIZER.vocab_size)
    with pytest.raises(CheckpointError, match=rf"has {TOKENIZER.vocab_size} ids.*has 17\."):
        check_vocabulary(TOKENIZER, 17)


def test_a_folder_without_tokenizer_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_damaged_files_are_named(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_older_formats_are_converted_by_transformers(tmp_path):
    vocabulary = {f"{a}": i for i, a in enumerate(["<|endoftext|>", "a", "b", "ab", "Ġ", "c"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab c") == [3, 4, 5]
    assert tokenizer.eos_token_id == 0
