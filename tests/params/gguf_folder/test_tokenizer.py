"""Texts have the tokens that llama.cpp gives them, however they are split: see scripts/update_gguf_goldens.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxpaged.params.formats.gguf.reader import GgufHeader
from jaxpaged.params.gguf_folder.facts import Facts
from jaxpaged.params.gguf_folder.pre_tokenizers import PRE_TOKENIZERS
from jaxpaged.params.gguf_folder.tokenizer import joins, tokenizer_files

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/formats/gguf_tokenizers.json").read_text(encoding="utf-8"))
BYTE_LEVEL = {**GOLDEN["byte_level"], "model": "gpt2", "bos_token_id": 0, "eos_token_id": 1}
NUMBERS = ("token_type", "scores", "precompiled_charsmap")
SENTENCEPIECE = {"model": "llama", "bos_token_id": 1, "eos_token_id": 2}


def tokenizer_of(facts):
    """The tokenizer of a file with these facts, without their prefix."""
    named = {f"tokenizer.ggml.{name}": np.array(value) if name in NUMBERS else value for name, value in facts.items()}
    header = GgufHeader({"general.architecture": "llama", **named}, {}, (Path("model.gguf"),))
    files = tokenizer_files(Facts(header))
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


@pytest.mark.parametrize("way", GOLDEN["ways"])
def test_byte_level_tokens_are_llama_cpp_s(way):
    tokenizer = tokenizer_of({**BYTE_LEVEL, "pre": way})
    for text, expected in zip(GOLDEN["texts"], GOLDEN["ways"][way], strict=True):
        assert tokenizer.encode(text).ids == expected, text
        if "\u0915" not in text:
            assert tokenizer.decode(expected, skip_special_tokens=False).endswith(text)


@pytest.mark.parametrize("name", GOLDEN["sentencepiece"])
def test_pieces_with_scores_are_joined_as_llama_cpp_does(name):
    tokenizer = tokenizer_of({**GOLDEN["sentencepiece"][name], **SENTENCEPIECE})
    for text, expected in zip(GOLDEN["texts"], GOLDEN["of_sentencepiece"][name], strict=True):
        assert tokenizer.encode(text).ids == expected, text
        plain = [token for token in expected if token not in (1, 2)]
        if "<s>" not in text:
            assert tokenizer.decode(plain, skip_special_tokens=False) == text


def test_pieces_whose_joins_are_said_are_joined_as_llama_cpp_does():
    pieces = GOLDEN["sentencepiece"]["plain"]
    named = {f"tokenizer.ggml.{name}": pieces[name] for name in ("tokens", "token_type")}
    scores = {"tokenizer.ggml.scores": np.array(pieces["scores"])}
    facts = Facts(GgufHeader({"general.architecture": "gemma4", **named, **scores}, {}, (Path("model.gguf"),)))
    merges = [" ".join(pair) for pair in joins(facts, pieces["tokens"], pieces["token_type"])]
    zeros = [0.0] * len(pieces["scores"])
    tokenizer = tokenizer_of({**pieces, **SENTENCEPIECE, "model": "gemma4", "scores": zeros, "merges": merges})
    for text, expected in zip(GOLDEN["texts"], GOLDEN["of_merges"], strict=True):
        assert tokenizer.encode(text).ids == expected, text


@pytest.mark.parametrize("name", GOLDEN["likeliest"])
def test_the_likeliest_pieces_are_those_that_llama_cpp_takes(name):
    """But for a text of one space, before which sentencepiece puts another one, and llama.cpp none."""
    tokenizer = tokenizer_of(GOLDEN["likeliest"][name])
    for text, expected in zip(GOLDEN["texts"], GOLDEN["of_likeliest"][name], strict=True):
        if (name, text) != ("plain", " "):
            assert tokenizer.encode(text).ids == expected, text


@pytest.mark.parametrize("way", PRE_TOKENIZERS)
def test_every_way_to_split_texts_is_one_that_the_library_takes(way):
    tokenizer = tokenizer_of({**BYTE_LEVEL, "pre": way, "add_bos_token": False})
    assert tokenizer.decode(tokenizer.encode("It's 1234!\n ok").ids) == "It's 1234!\n ok"


def test_tokens_around_a_text_are_those_that_the_file_asks_for():
    tokenizer = tokenizer_of({**BYTE_LEVEL, "pre": "gpt-2", "add_bos_token": True, "add_eos_token": True})
    assert tokenizer.encode("x").tokens == ["<s>", "x", "</s>"]
