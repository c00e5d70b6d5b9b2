"""The bytes of tokens that stand for bytes, not for characters.

With a byte-level decoder that is every token of the vocabulary: a letter of it stands for each of the 256 bytes. With
byte fallback these are tokens like "<0xE2>"; those below "<0x80>" are characters. This module knows no
text of a sequence.
"""

import json
import re
from collections.abc import Container, Mapping
from typing import Any

import tokenizers

FALLBACK = re.compile(r"<0x([89A-Fa-f][0-9A-Fa-f])>")


class BytePieces(dict[int, bytes | None]):
    """token id -> its bytes; None for a token that stands for characters, or is added to the vocabulary.

    Entries are found when they are first asked for.
    """

    def __init__(self, backend: tokenizers.Tokenizer, added_tokens: Container[int]):
        super().__init__()
        self._backend = backend
        self._added_tokens = added_tokens
        kinds = set() if backend.decoder is None else kinds_of(json.loads(backend.decoder.__getstate__()))
        self._byte_of = byte_letters() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds

    def __missing__(self, token_id: int) -> bytes | None:
        piece = self[token_id] = self._find(token_id)
        return piece

    def _find(self, token_id: int) -> bytes | None:
        token = None if token_id in self._added_tokens else self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_of:
            return bytes(self._byte_of[letter] for letter in token) if self._byte_of.keys() >= set(token) else None
        byte = FALLBACK.fullmatch(token) if self._falls_back else None
        return None if byte is None else bytes([int(byte[1], 16)])


def kinds_of(decoder: Mapping[str, Any]) -> set[str]:
    """The types of a decoder, as `tokenizer.json` describes it, and of those inside it."""
    return {decoder["type"]}.union(*map(kinds_of, decoder.get("decoders", ())))


def byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: those that Latin-1 can show stand for themselves, others follow it."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
