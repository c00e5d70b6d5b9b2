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


def template(named: dict[str, str], ids: dict[str, int]) -> dict[str, Any]:
    """What puts tokens around a text."""

    def around(sequence: str) -> list[dict[str, Any]]:
        special = {name: [{"SpecialToken": {"id": named[name], "type_id": 0}}] for name in ids}
        middle = [{"Sequence": {"id": sequence, "type_id": 0}}]
        return [*special.get("bos_token", []), *middle, *special.get("eos_token", [])]

    texts = {named[name]: {"id": named[name], "ids": [i], "tokens": [named[name]]} for name, i in ids.items()}
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": texts,
    }
