#!/usr/bin/env python3
"""Record what llama.cpp makes of GGUF's types of weights and of texts, into tests/golden/formats/gguf_*.

    scripts/update_gguf_goldens.py [--env FOLDER]

For each type, some rows are packed by ggml's C functions and decoded by them: TYPE/rows are the bytes, TYPE/weight
the weights. For each way to split texts, and for sentencepiece's pieces, a small vocabulary and the tokens of some
texts. The library comes with the package xllamacpp. tekken.json has such a vocabulary as Mistral's own file, and what
mistral-common makes of the texts. Runs itself in the environment of update_format_goldens.py.
"""

import argparse
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

from update_format_goldens import GOLDEN, OWN_ENV, ROOT, own_environment

DEQUANTIZE = {
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_K",
    "Q3_K": "q3_K",
    "Q4_K": "q4_K",
    "Q5_K": "q5_K",
    "Q6_K": "q6_K",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
}
INPUTS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, default=OWN_ENV, help="environment with the libraries; made when missing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        record_weights()
        record_tokenizers()
        record_tekken()
        return
    python = own_environment(arguments.env)
    sys.exit(subprocess.run([python, __file__, "--inside"]).returncode)


def ggml() -> ctypes.CDLL:
    """llama.cpp's library, whose functions xllamacpp exports."""
    import xllamacpp

    return ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))


def record_weights() -> None:
    import gguf
    import numpy as np

    library, made = ggml(), {}
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    weight = test_rows(np)
    for name, suffix in DEQUANTIZE.items():
        kind = gguf.GGMLQuantizationType[name]
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows = np.zeros((len(weight), INPUTS // block * num_bytes), np.uint8)
        sizes = (ctypes.c_int64(size) for size in (0, len(weight), INPUTS))
        written = library.ggml_quantize_chunk(int(kind), pointer(weight), pointer(rows), *sizes, None)
        assert written == rows.nbytes, (name, written)
        out = np.empty_like(weight)
        dequantize = getattr(library, f"dequantize_row_{suffix}")
        dequantize(pointer(rows), pointer(out), ctypes.c_int64(weight.size))
        error = float(np.sqrt(((out - weight)[:3] ** 2).mean() / (weight[:3] ** 2).mean()))
        print(f"{name:8} relative error {error:.4f}")
        made[f"{name}/rows"], made[f"{name}/weight"] = rows, out
    np.savez_compressed(GOLDEN / "gguf_weights.npz", **made)


def test_rows(np: Any) -> Any:
    """float32 [6, INPUTS]: common weights, outliers, zeros, and rows that are nothing but a minimum or nearly so."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((6, INPUTS)) * 0.02
    rows[1] += 0.03
    rows[2] *= np.exp(random.standard_normal(INPUTS))
    rows[3] = 0
    rows[4] = -0.25
    rows[5] = np.where(np.arange(INPUTS) % 256 < 128, -0.5, random.standard_normal(INPUTS) * 1e-4)
    return rows.astype(np.float32)


TEXTS = (
    "Hello world! It's 12345 o'clock, isn't it?",
    "  two  spaces\n\n\tand a tab \r\n end ",
    "HTTPServer fooBar camelCase ÄÖÜß naïve café",
    "日本語のテキスト、中文 한국어 и русский текст",
    "price: $3.50/kg (+10%) @home #tag a_b <b>x</b> /path/to\n/x",
    "'S 'T DON'T We'Ll they'RE",
    "emoji 🙂🙂 and \u200d joined \u0915\u094d\u0937",
    "1 22 333 4444 55555 666666",
    "<s>chat</s> <|im_start|>",
    "",
    " ",
    "x",
)
WAYS = "gpt-2 smollm llama-bpe dbrx qwen2 gpt-4o tekken deepseek-v3 kimi-k2 seed-coder deepseek-llm".split()
"""What `tokenizer.ggml.pre` may say, one of each kind."""
ENDS = ["<s>", "</s>", "<|im_start|>"]
"""Control tokens."""


def record_tokenizers() -> None:
    """The vocabularies are trained on the documents of this repository and on the texts themselves."""
    import json
    import tempfile

    corpus = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("jaxpaged/guides/*.md"))]
    made: dict[str, Any] = {"texts": TEXTS, "byte_level": byte_level_pieces([*corpus, *TEXTS])}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        pieces = made["byte_level"]
        made["ways"] = {}
        for way in WAYS:
            write_vocabulary(path, {**pieces, "model": "gpt2", "pre": way, "bos_token_id": 0, "eos_token_id": 1})
            made["ways"][way] = tokens_of(path)
        made["sentencepiece"], made["of_sentencepiece"] = {}, {}
        for prefix in (True, False):
            pieces = sentencepieces(Path(folder), [*corpus, *TEXTS], prefix)
            write_vocabulary(path, {**pieces, "model": "llama", "bos_token_id": 1, "eos_token_id": 2})
            name = "prefix" if prefix else "plain"
            made["sentencepiece"][name], made["of_sentencepiece"][name] = pieces, tokens_of(path)
        write_vocabulary(path, {**with_merges(pieces), "bos_token_id": 1, "eos_token_id": 2})
        made["of_merges"] = tokens_of(path)
        made["likeliest"], made["of_likeliest"] = {}, {}
        for merged in (True, False):
            pieces = likeliest_pieces(Path(folder), [*corpus, *TEXTS], merged)
            write_vocabulary(path, pieces)
            name = "merged" if merged else "plain"
            made["likeliest"][name], made["of_likeliest"][name] = pieces, tokens_of(path)
    text = json.dumps(made, ensure_ascii=False)
    (GOLDEN / "gguf_tokenizers.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(text)} bytes of tokenizers")


TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_SPECIAL, BEYOND = 24, 5
"""Ids of special tokens, of which few have names, and pieces at the end that are not used."""


def record_tekken() -> None:
    """The byte-level vocabulary of gguf_tokenizers.json as a file of Mistral's."""
    import base64
    import json

    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    made = json.loads((GOLDEN / "gguf_tokenizers.json").read_text(encoding="utf-8"))["byte_level"]
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    named = [token for token in made["tokens"] if token not in ENDS]
    longer = [bytes(byte_of[letter] for letter in token) for token in named if len(token) > 1]
    pieces = [*(bytes([byte]) for byte in range(256)), *longer]
    all_pieces = [*pieces, *(b"beyond%d" % i for i in range(BEYOND))]
    file = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(all_pieces),
            "default_vocab_size": len(pieces) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v11",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for i, piece in enumerate(all_pieces)
        ],
        "special_tokens": [
            {"rank": i, "token_str": text, "is_control": True}
            for i, text in enumerate("<unk> <s> </s> [INST] [/INST]".split())
        ],
    }
    path = GOLDEN / "tekken.json"
    path.write_text(json.dumps(file), encoding="utf-8")
    tokenizer = Tekkenizer.from_file(path)
    tokens = [tokenizer.encode(text, bos=True, eos=False) for text in TEXTS]
    text = json.dumps({"file": file, "texts": TEXTS, "tokens": tokens}, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def byte_level_pieces(corpus: list[str]) -> dict[str, Any]:
    """Facts of a vocabulary of pairs of bytes."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=ENDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3 if token in ENDS else 1 for token in tokens]
    return {"tokens": tokens, "token_type": kinds, "merges": [" ".join(merge) for merge in model["merges"]]}


def sentencepieces(folder: Path, corpus: list[str], prefix: bool) -> dict[str, Any]:
    """Facts of a vocabulary of pieces with scores, and bytes for what they lack."""
    import sentencepiece

    path = trained_pieces(
        folder,
        corpus,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["<|im_start|>"],
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.get_piece_size())
    kinds = [6 if model.is_byte(i) else 3 if model.is_control(i) else 2 if model.is_unknown(i) else 1 for i in ids]
    tokens = [model.id_to_piece(i) for i in ids]
    kinds = [4 if token == "<|im_start|>" else kind for token, kind in zip(tokens, kinds)]
    scores = [model.get_score(i) for i in ids]
    facts = {"tokens": tokens, "token_type": kinds, "scores": scores, "add_space_prefix": prefix}
    return {**facts, "unknown_token_id": model.unk_id()}


def trained_pieces(folder: Path, corpus: list[str], **settings: Any) -> Path:
    """The file of a vocabulary that sentencepiece makes of texts."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus for line in text.splitlines() if line.strip()]),
        model_prefix=str(folder / "pieces"),
        character_coverage=0.99,
        minloglevel=2,
        **settings,
    )
    return folder / "pieces.model"


RULES = (("\t", " "), ("\n", " "), ("\r", ""), ("ﬁ", "fi"), ("１", "1"), ("é", "e\u0301"), ("\u200d", " "))
"""What letters become before texts are split."""


def likeliest_pieces(folder: Path, corpus: list[str], merged: bool) -> dict[str, Any]:
    """Facts of a vocabulary of pieces with the logarithms of how likely they are, as XLM-RoBERTa's files have it.
    `merged`: several spaces are one, and letters are replaced."""
    from sentencepiece import sentencepiece_model_pb2

    def codes(text: str) -> str:
        return " ".join(f"{ord(letter):X}" for letter in text)

    rules = folder / "rules.tsv"
    rules.write_text("".join(f"{codes(found)}\t{codes(made)}\n" for found, made in RULES), encoding="utf-8")
    normalized = {"normalization_rule_tsv": str(rules)} if merged else {"normalization_rule_name": "identity"}
    path = trained_pieces(
        folder, corpus, vocab_size=400, model_type="unigram", remove_extra_whitespaces=merged, **normalized
    )
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(path.read_bytes())
    pieces = [(piece.piece, piece.score) for piece in model.pieces][3:]
    filled = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, ("[PAD401]", -10_000.0)]
    facts = {
        "model": "t5",
        "tokens": [token for token, _ in filled],
        "scores": [score for _, score in filled],
        "token_type": [3, 3, 3, 2, *[1] * len(pieces), 5],
        "add_space_prefix": True,
        "remove_extra_whitespaces": merged,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    letters = [*model.normalizer_spec.precompiled_charsmap]
    return {**facts, "precompiled_charsmap": letters} if letters else facts


def with_merges(pieces: dict[str, Any]) -> dict[str, Any]:
    """The same vocabulary as Gemma 4 has it: pairs that are joined, in order, in place of scores that count."""
    known = {token for token, kind in zip(pieces["tokens"], pieces["token_type"]) if kind in (1, 4)}
    best_first = [token for _, token in sorted(zip(pieces["scores"], pieces["tokens"]), key=lambda each: -each[0])]
    halves = ((token[:cut], token[cut:]) for token in best_first if token in known for cut in range(1, len(token)))
    merges = [f"{left} {right}" for left, right in halves if left in known and right in known]
    return {**pieces, "model": "gemma4", "merges": merges}


def write_vocabulary(path: Path, facts: dict[str, Any]) -> None:
    """A model of nothing but its tokenizer, as far as llama.cpp allows."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in facts.items():
        key = f"tokenizer.ggml.{name}"
        if name == "precompiled_charsmap":
            writer.add_array(key, bytes(value))
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    shapes = {"token_embd": (len(facts["tokens"]), 8), "output_norm": (8,)}
    names = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (8,) if name.endswith("norm") else (8, 8) for name in names}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Params(ctypes.Structure):
    """Any of llama.cpp's structures of options, whose content is not looked at: larger than all of them."""

    _fields_ = (("bytes", ctypes.c_ubyte * 1024),)


def tokens_of(path: Path) -> list[list[int]]:
    """Of each text, as llama.cpp tokenises it, with the tokens around it."""
    library = ggml()
    library.llama_model_default_params.restype = Params
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_tokenize.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int32,
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_bool,
        ctypes.c_bool,
    ]
    model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
    assert model, f"llama.cpp does not load {path}"
    vocab, found = library.llama_model_get_vocab(model), []
    for text in TEXTS:
        raw, room = text.encode(), (ctypes.c_int32 * 1024)()
        count = library.llama_tokenize(vocab, raw, len(raw), room, len(room), True, True)
        assert count >= 0, (text, count)
        found.append(list(room[:count]))
    return found


def pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


if __name__ == "__main__":
    main()
