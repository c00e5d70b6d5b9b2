"""Texts of tokens that are the same wherever the token stands: decoding them is a look-up.

Which tokens these are follows from the tokenizer's decoder. Three kinds of decoder treat every token by itself, apart
from the first of a text and from bytes of characters:

- byte-level: the text is the bytes of all tokens in a row, so whole characters stay what they are;
- sentencepiece: a word mark becomes a space, bytes written as "<0xE2>" are joined, a leading space is cut off;
- metaspace: a word mark becomes a space, or nothing in the first token.

With any other decoder no token counts as plain. This module knows nothing of streams: what to do with tokens that are
not plain, and with the first of a text, is told in `detokenizer`.
"""

import json
from collections.abc import Container, Mapping
from typing import Any

import tokenizers

INCOMPLETE = "\ufffd"
"""What decoders put in place of bytes that are not (yet) a character."""


class PlainPieces(dict[int, str]):
    """token id -> the text that it adds behind any text that ends with a whole character.

    The empty text stands for "it depends": parts of characters, bytes, added tokens, ids without a token. Entries are
    found when they are first asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added_tokens: Container[int]):
        super().__init__()
        self._backend = backend
        self._added_tokens = added_tokens
        decoder = backend.decoder
        self._any = decoder is not None and treats_tokens_alone(json.loads(decoder.__getstate__()))

    def __missing__(self, token_id: int) -> str:
        piece = self[token_id] = self._find(token_id)
        return piece

    def _find(self, token_id: int) -> str:
        if not self._any or token_id in self._added_tokens:
            return ""
        token = self._backend.id_to_token(token_id)
        if token is None or (token.startswith("<0x") and token.endswith(">")):
            return ""
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return "" if INCOMPLETE in twice else twice[len(once) :]


def treats_tokens_alone(decoder: Mapping[str, Any]) -> bool:
    """Whether a decoder, as `tokenizer.json` describes it, is one of the three kinds above."""
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds in (["ByteLevel"], ["Metaspace"]):
        return True
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    cuts_more = [step for step in steps if step["type"] == "Strip" and (step["start"] > 1 or step["stop"])]
    return "String" in steps[0]["pattern"] and not cuts_more
