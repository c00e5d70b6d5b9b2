"""Text to token ids and back: a thin layer over the `tokenizers` library and `tokenizer_config.json`.

`load_tokenizer` reads a Hugging Face folder. transformers is imported only for folders without `tokenizer.json`,
since it costs more than a second. This module knows nothing of chats (see `chat_template`) or of streams of
text (see `detokenizer`).

Of a text that is too long only the part that matters is tokenised (`enough_text`): in pieces until there are enough
tokens. So time and memory follow the model's limit, not the length of the text that a client sends. No bound of bytes
per token is assumed: a normalizer may drop characters, and an unknown word may be a single token.

Some tokens stand for bytes, not for characters. With a byte-level decoder that is every token of the vocabulary: a
letter of it stands for each of the 256 bytes. With byte fallback these are tokens like "<0xE2>"; those below "<0x80>"
are characters.
"""

import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from jaxpaged.engine.input import tekken
from jaxpaged.engine.output.plain_pieces import PlainPieces
from jaxpaged.errors import CheckpointError, RequestError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LONG_TEXT = 2048
"""Characters above which a text is worth a thread: about a millisecond of work."""
PIECE = 16_384
"""Characters that are tokenised at a time."""
REACH = 1024
"""Characters in which a place to cut is looked for. White space begins a token in all tokenizers of language models, so
tokens after such a place are those of the whole text."""
MARGIN = 256
"""Tokens that are kept beyond those asked for, since where a text has no white space (a run of one letter, a script
without spaces) its tokens near the cut may be others than those of the whole text."""
LOST_AT_CUT = 8
"""Tokens of a piece that are not counted: in the whole text it might have fewer."""
WHITE_SPACE_BEGINS = re.compile(r"(?<=\S)\s")


class Tokenizer:
    """Encodes and decodes with one `tokenizers.Tokenizer`.

    `named_tokens` maps "bos_token", "eos_token", ... to their text, as chat templates use them.
    `vocab_size` is the largest id plus one. Which tokens go around a text is what `tokenizer.json` says: as in
    transformers 5, `add_bos_token` and `add_eos_token` of the config count only for older formats.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any] | None = None):
        config = config or {}
        self.backend = backend
        self.config = dict(config)
        self.named_tokens = {name: token_text(config[name]) for name in NAMED_TOKENS if config.get(name)}
        mark_special(backend, self.named_tokens.values())
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.plain_pieces = PlainPieces(backend, self.added_tokens)
        self.byte_pieces = BytePieces(backend, self.added_tokens)
        backend.no_truncation()
        backend.no_padding()

    def _named_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts the model's beginning (and end) tokens around it.

        Raises RequestError for text that is not valid Unicode.
        """
        return self.encoding(text, add_special_tokens).ids

    def encoding(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The same in the library's form, which can be cut and joined.

        A long text is a batch of one: only for batches does the library let go of the interpreter's lock, and without
        offsets it takes less than half the time and memory.
        """
        try:
            if len(text) <= LONG_TEXT:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:  # what the library makes of half a surrogate pair
            raise RequestError(
                f"{text[:40]!r} is not valid Unicode: it holds half of a surrogate pair. Replace it."
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Ids outside the vocabulary have no text."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that adds `text` where it stands: its own ones, if it is a part of a character."""
        part = self.byte_pieces[token_id]
        return text.encode("utf-8", "replace") if part is None else part


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Read the tokenizer of a Hugging Face folder.

    Raises CheckpointError when there is none, or when its files cannot be read.
    """
    folder = Path(folder)
    config = read_json(folder / "tokenizer_config.json")
    named = read_json(folder / "special_tokens_map.json")
    config = {**{name: named[name] for name in NAMED_TOKENS if name in named}, **config}
    file = folder / "tokenizer.json"
    if not file.exists():
        of_mistral = read_json(folder / tekken.FILE)
        return tekken_tokenizer(folder, of_mistral, config) if of_mistral else convert_tokenizer(folder, config)
    return Tokenizer(read_backend(file, lambda: tokenizers.Tokenizer.from_file(str(file))), config)


def read_backend(file: Path, read: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    """What the library makes of a file."""
    try:
        return read()
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} is not a readable tokenizer: {error}. Fetch the file again.") from error


def tekken_tokenizer(folder: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a folder that has Mistral's own file of it."""
    letter_of = {byte: letter for letter, byte in byte_letters().items()}
    file = folder / tekken.FILE
    made, named = tekken.described(tekken.content_of(file, content), letter_of)
    return Tokenizer(read_backend(file, lambda: tokenizers.Tokenizer.from_str(json.dumps(made))), {**named, **config})


def convert_tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Let transformers convert an older format, such as a sentencepiece model without `tokenizer.json`."""
    files = sorted(path.name for path in folder.glob("*")) if folder.is_dir() else []
    if not any(name.endswith((".model", ".tiktoken")) or name.startswith("vocab.") for name in files):
        raise CheckpointError(
            f"{folder} has no tokenizer: neither tokenizer.json nor an older format. Add tokenizer.json, "
            "or name another folder with the option tokenizer."
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend = converted.backend_tokenizer
    except Exception as error:  # many kinds, by format and by missing library
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers could not convert its older format: {error}. "
            "Save the tokenizer as tokenizer.json."
        ) from error
    named = {name: str(token) for name in NAMED_TOKENS if (token := getattr(converted, name, None))}
    return Tokenizer(backend, {**config, **named})


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise CheckpointError when the tokenizer has ids for which the model has no embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocabulary has {vocab_size}. "
            "Tokenizer and model do not belong together; check the option tokenizer."
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when the file does not exist. Raises CheckpointError when it is damaged."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. Fetch the file again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object. Fetch the file again.")
    return value


def token_text(token: Any) -> str:
    """The text of a token in `tokenizer_config.json`, which may be a text or an object with `content`."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Make named tokens special where `tokenizer.json` does not. Those without an id stay unknown: a padding
    token that nobody uses must not grow the vocabulary beyond the model's."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    )


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


class PromptTooLongError(RequestError):
    """A prompt has more tokens than can be."""


@dataclass(frozen=True)
class Truncation:
    """Keep `keep` tokens of a prompt, the last ones or, from the right, the first. -1: as many as fit. None: all."""

    keep: int | None = None
    from_right: bool = False

    def length(self, room: int) -> int | None:
        """How many tokens are kept, where `room` fit. Raises RequestError for what is no length."""
        keep = self.keep
        if keep is None:
            return None
        if isinstance(keep, bool) or not isinstance(keep, int) or (keep < 1 and keep != -1):
            raise RequestError(
                f"truncate_prompt_tokens is {keep!r}; it must be at least 1, or -1 for what the model takes.",
                "truncate_prompt_tokens",
            )
        return room if keep == -1 else keep

    def cut(self, token_ids: Sequence[Any], room: int) -> list[Any]:
        """Those that are kept."""
        length = self.length(room)
        if length is None:
            return list(token_ids)
        return list(token_ids[:length] if self.from_right else token_ids[-length:])


def enough_text(tokenizer: Tokenizer, text: str, num_tokens: int, from_end: bool = False) -> str:
    """A beginning of `text`, or an end of it, with at least `num_tokens` + MARGIN tokens; all of it if it has fewer."""
    if len(text) <= max(num_tokens, PIECE):
        return text
    count, taken = 0, 0
    for piece in pieces(text, from_end):
        if count >= num_tokens + MARGIN:
            return text[len(text) - taken :] if from_end else text[:taken]
        count += max(len(tokenizer.encode(piece, add_special_tokens=False)) - LOST_AT_CUT, 0)
        taken += len(piece)
    return text


def pieces(text: str, from_end: bool) -> Iterator[str]:
    """The text in pieces from its beginning, or from its end."""
    if from_end:
        end = len(text)
        while end > 0:
            start = place_to_cut(text, end - PIECE)
            yield text[start:end]
            end = start
        return
    start = 0
    while start < len(text):
        end = place_to_cut(text, start + PIECE)
        yield text[start:end]
        start = end


def place_to_cut(text: str, at: int) -> int:
    """Where white space begins next after `at`, or `at` itself where there is none near."""
    if not 0 < at < len(text):
        return min(max(at, 0), len(text))
    found = WHITE_SPACE_BEGINS.search(text, at, min(at + REACH, len(text)))
    return at if found is None else found.start()


def checked_length(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Raise PromptTooLongError when the text certainly has more than `most` tokens."""
    part = enough_text(tokenizer, text, most)
    if len(part) < len(text):
        raise PromptTooLongError(
            f"prompt has more than {most} tokens: so many are in the first {len(part)} of its {len(text)} "
            "characters. Shorten it.",
            "prompt",
        )
