"""Mistral's tekken.json -> what tokenizer.json says of the same tokenizer.

The file has pieces of bytes in the order in which they are joined, and behind how many special tokens their ids begin.
Two pieces are joined where what they make comes first; as tokenizer.json has it, these are pairs in that order.
"""

import base64
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpaged.encoding.tokenizer_json import BYTES, added_token, bpe, split_to_bytes, template
from jaxpaged.errors import CheckpointError

FILE = "tekken.json"
OF_FIRST_FILES = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS] "
    "[IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
"""Special tokens of files that do not name theirs."""
MOST_TOKENS = 1 << 24
"""No vocabulary is near it; special tokens without names are made, however many a file says."""
NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
"""What tokenizer_config.json calls some of them."""


@dataclass(frozen=True)
class Content:
    """`pieces` of bytes, which `pattern` splits a text for. `texts`: special tokens, by their ids; those that have no
    name are called by it. `plain`: ids of those that are shown in answers."""

    pattern: str
    pieces: Sequence[bytes]
    texts: Sequence[str]
    plain: Container[int]


def content_of(path: Path, given: Mapping[str, Any]) -> Content:
    """What the file says. Raises CheckpointError for a file that is no such tokenizer."""
    try:
        sizes = given["config"]
        num_special, vocab_size = (sizes[f"default_{name}"] for name in ("num_special_tokens", "vocab_size"))
        if not 0 <= num_special <= vocab_size <= MOST_TOKENS:
            raise ValueError(f"{num_special} special tokens of {vocab_size}")
        pieces = [base64.b64decode(piece["token_bytes"]) for piece in given["vocab"][: vocab_size - num_special]]
        first: list[dict[str, Any]] = [{"rank": i, "token_str": text} for i, text in enumerate(OF_FIRST_FILES)]
        tokens = {t["rank"]: t for t in given.get("special_tokens") or first}
        texts = [tokens[i]["token_str"] if i in tokens else f"<SPECIAL_{i}>" for i in range(num_special)]
        plain = {i for i, token in tokens.items() if not token.get("is_control", True)}
        is_whole = len({*pieces}) == vocab_size - num_special and max(tokens) < num_special == len({*texts})
        content = Content(str(sizes["pattern"]), pieces, texts, plain)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is no readable tokenizer: {error!r}. Fetch the file again.") from error
    if not is_whole:
        raise CheckpointError(
            f"{path} has {len({*pieces})} different pieces and special tokens up to {max(tokens)}; it says that they "
            f"are {vocab_size - num_special}, behind {num_special} special tokens. Fetch the file again."
        )
    return content


def described(content: Content, letter_of: Mapping[int, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(tokenizer.json, the tokens that tokenizer_config.json names). `letter_of`: how byte-level vocabularies write
    bytes."""
    letters = ["".join(map(letter_of.__getitem__, piece)) for piece in content.pieces]
    named = {name: text for name, text in NAMED.items() if text in content.texts}
    begins = {"bos_token": content.texts.index(named["bos_token"])} if "bos_token" in named else {}
    model = bpe([*content.texts, *letters], joins(letters)) | {"ignore_merges": True}
    model["vocab"] |= {text: i for i, text in enumerate(content.texts)}  # also where a piece has the letters of one
    special = enumerate(content.texts)
    made = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added_token(i, text, i not in content.plain, normalized=False) for i, text in special],
        "normalizer": None,
        "pre_tokenizer": split_to_bytes([content.pattern]),
        "model": model,
        "decoder": BYTES,
        "post_processor": template(named, begins) if begins else None,
    }
    return made, named


def joins(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Two pieces each that are a third one, in the order of that."""
    place = {piece: i for i, piece in enumerate(pieces)}
    found: list[tuple[str, str]] = []
    for piece in pieces:
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in halves if pair[0] in place and pair[1] in place]
        found += sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))
    return found
