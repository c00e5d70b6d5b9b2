"""The small tokenizer with tokens that stand for markers, as grammars need it."""

import json
from typing import Any, NamedTuple

import pytest
from tokenizers import AddedToken

from tests.engine.small_tokenizer import make_backend

llguidance = pytest.importorskip("llguidance")


class MarkedTokenizer(NamedTuple):
    """`ids`: of all added tokens, by their text. `for_grammars`: the same vocabulary as llguidance takes it."""

    backend: Any
    ids: dict[str, int]
    for_grammars: Any

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


def marked_tokenizer(special: list[str], plain: list[str]) -> MarkedTokenizer:
    """`special` markers are no text to a tokenizer, `plain` ones are."""
    backend = make_backend()
    backend.add_special_tokens([AddedToken(each, special=True) for each in special])
    backend.add_tokens([AddedToken(each, special=False) for each in plain])
    text = backend.to_str()
    ids = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
    return MarkedTokenizer(backend, ids, llguidance.LLTokenizer(text, n_vocab=backend.get_vocab_size(), eos_token=[2]))
