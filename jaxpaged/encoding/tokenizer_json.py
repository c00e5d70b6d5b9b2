"""Parts of a tokenizer.json, as the tokenizers library reads it, for tokenizers that come in other files."""

from collections.abc import Iterable, Sequence
from typing import Any

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
"""Bytes to letters, or back."""


def split_to_bytes(patterns: Iterable[str]) -> dict[str, Any]:
    """What splits a text by one pattern after the other, and writes what comes of it in letters of bytes."""
    splits = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in patterns]
    return {"type": "Sequence", "pretokenizers": [*splits, BYTES]}


def added_token(token_id: int, token: str, is_special: bool, normalized: bool) -> dict[str, Any]:
    """A token that is found in a text as it is, before anything is split."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized}
    return {"id": token_id, "content": token, **plain, "special": is_special}


def bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A model that joins pairs of pieces."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }


def template(
    named: dict[str, str],
    ids: dict[str, int],
    *,
    ends_first: int = 1,
    begins_second: bool = True,
    second_type: int = 0,
) -> dict[str, Any]:
    """What puts tokens around a text, and around both of a pair.

    `ends_first`: how many tokens end the first of a pair. `begins_second`: the second begins as one alone does.
    `second_type`: what its tokens are told to be.
    """

    def special(name: str, type_id: int = 0) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": named[name], "type_id": type_id}}] if name in ids else []

    def ended(sequence: str, num_ends: int = 1, type_id: int = 0) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": sequence, "type_id": type_id}}, *num_ends * special("eos_token", type_id)]

    texts = {named[name]: {"id": named[name], "ids": [i], "tokens": [named[name]]} for name, i in ids.items()}
    begin = special("bos_token")
    second = [*begins_second * begin, *ended("B", type_id=second_type)]
    return {
        "type": "TemplateProcessing",
        "single": [*begin, *ended("A")],
        "pair": [*begin, *ended("A", ends_first), *second],
        "special_tokens": texts,
    }
