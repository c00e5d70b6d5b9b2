"""A small tokenizer with every kind of decoder."""

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from jaxpaged.engine.input.tokenizer import Tokenizer, load_tokenizer
from jaxpaged.engine.output.plain_pieces import INCOMPLETE
from jaxpaged.params.hub import resolve_model_folder
from tests.engine.small_tokenizer import make_tokenizer

WORDS = ["▁the", "▁cat", "cat", "##cat", "s", "▁", "▁▁", ".", "é", "▁€", "\n", "<0xyz>", INCOMPLETE, "a" + INCOMPLETE]
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80)]
REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def sentencepiece_like(decoder):
    vocabulary = {token: i for i, token in enumerate([*WORDS, *BYTES])}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.add_tokens([AddedToken("▁▁▁", normalized=False), AddedToken("<tool>")])
    return Tokenizer(backend)


TOKENIZERS = {
    "embedded": lambda: load_tokenizer(resolve_model_folder("demo")),
    "byte-level": make_tokenizer,
    "Llama 2": lambda: sentencepiece_like(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)])),
    "Gemma": lambda: sentencepiece_like(decoders.Sequence([REPLACE, FALLBACK, FUSE])),
    "metaspace": lambda: sentencepiece_like(decoders.Metaspace()),
    "metaspace, always": lambda: sentencepiece_like(decoders.Metaspace(prepend_scheme="never")),
    "unknown": lambda: sentencepiece_like(decoders.BPEDecoder(suffix="s")),
    "wordpiece": lambda: sentencepiece_like(decoders.WordPiece()),
    "ctc": lambda: sentencepiece_like(decoders.CTC(pad_token="s", word_delimiter_token="▁")),
    "byte-level and more": lambda: sentencepiece_like(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "no decoder": lambda: sentencepiece_like(decoders.Sequence([])),
    "none": lambda: sentencepiece_like(None),
}
