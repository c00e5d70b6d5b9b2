"""The tokenizer of BERT in a GGUF file -> parts of tokenizer.json: words, and the pieces of those that are no tokens.

A file has a letter for a space before beginnings of words, where the model's own list has "##" before all that is none.
It does not say whether capitals are made small: they are unless some token has one.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.facts import Facts

SPACE, INSIDE = "▁", "##"
CONTROL = 3
UNKNOWN = "[UNK]"


def own_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """As the model's own list has them."""

    def own(token: str, kind: int) -> str:
        if kind == CONTROL:
            return token
        return token.removeprefix(SPACE) if token.startswith(SPACE) else INSIDE + token

    return [own(token, kind) for token, kind in zip(tokens, kinds, strict=True)]


def word_pieces(facts: Facts, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """What takes a text apart, of `own_tokens`. CheckpointError without a token for what has none."""
    if UNKNOWN not in tokens:
        raise CheckpointError(f"{facts.path}: the tokenizer lacks the token {UNKNOWN}. Download the file again.")
    normal = (token for token, kind in zip(tokens, kinds, strict=True) if kind != CONTROL)
    has_capitals = any(token != token.lower() for token in normal)
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not has_capitals,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {
            "type": "WordPiece",
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": 100,
            "vocab": {token: i for i, token in enumerate(tokens)},
        },
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": True},
    }
