"""The tokenizer in a GGUF file -> tokenizer.json and tokenizer_config.json, which load as those of any model.

Five kinds are read: "gpt2", byte-level pairs that are joined in order, "llama", sentencepiece's pieces with scores,
whose joins are found: two pieces that are a third one, the best first, "gemma4", such pieces whose joins are said,
"t5", pieces of which those are taken whose scores have the largest sum, and "bert", words, and the pieces of those that
are no tokens.
"""

import base64
from collections.abc import Sequence
from typing import Any

from jaxpaged.encoding.tokenizer_json import BYTES, added_token, bpe, split_to_bytes, template
from jaxpaged.errors import CheckpointError
from jaxpaged.params.gguf_folder.facts import Facts
from jaxpaged.params.gguf_folder.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
SPACE = "▁"
SAID = "gemma4"
PIECES = ("llama", SAID)
"""Kinds of tokenizers that know spaces by a letter of their own, and other bytes by tokens."""
LIKELIEST = "t5"
"""The kind that takes the pieces whose scores have the largest sum."""
WORDS, INSIDE, UNKNOWN_WORD = "bert", "##", "[UNK]"
"""The kind that knows words and pieces of them; what the model's own list has before all that begins no word."""
NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""What tokenizer_config.json calls a token -> what a GGUF file calls its id."""
OF_ENCODERS = {"bos_token": "cls bos", "eos_token": "seperator separator eos"}
"""The same of encoders, whose texts begin and end with other tokens; the first that is there."""
USUAL = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
"""Of words and their pieces, where a file does not say."""
TEMPLATE = "tokenizer.chat_template"


def tokenizer_files(facts: Facts, of_encoder: bool = False) -> dict[str, Any]:
    """File name -> its content; nothing without a tokenizer. Encoders have a token before a text, and one behind it.
    Raises CheckpointError for a tokenizer that is not read."""
    tokens = facts.texts("tokenizer.ggml.tokens")
    if not tokens:
        return {}
    if len(set(tokens)) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise CheckpointError(f"{facts.path}: the tokenizer has the token {twice!r} twice. Download the file again.")
    kinds = facts.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{facts.path}: the tokenizer has {len(tokens)} tokens and {len(kinds)} types of them. Download the file "
            "again."
        )
    model = facts.text("tokenizer.ggml.model", "")
    tokens = own_tokens(tokens, kinds) if model == WORDS else tokens
    names = {**NAMES, **OF_ENCODERS} if of_encoder else NAMES
    given = {name: [token_of(facts, tokens, each) for each in theirs.split()] for name, theirs in names.items()}
    named = {name: next(filter(None, each)) for name, each in given.items() if any(each)}
    if model == WORDS:
        named = {name: token for name, token in USUAL.items() if token in tokens} | named
    if model == "gpt2":
        made, begins = byte_level(facts, tokens)
    elif model == WORDS:
        made, begins = word_pieces(facts, tokens, kinds), True
    elif model == LIKELIEST:
        made, begins = likeliest_pieces(facts, tokens, kinds), True
    elif model in PIECES:
        merges = joins_said(facts) if model == SAID else joins(facts, tokens, kinds)
        made, begins = sentencepiece(facts, tokens, kinds, merges, named.get("unk_token")), True
    else:
        raise CheckpointError(
            f"{facts.path} has a tokenizer of the kind {model!r}; gpt2, {WORDS}, {LIKELIEST}, {', '.join(PIECES)} are "
            "read. Name the folder of the model's own with the option tokenizer, or serve the safetensors version."
        )
    spaced = model in PIECES and not has_prefix(facts)
    added = [
        added_token(i, token, kind != USER_DEFINED, normalized=spaced and SPACE in token)
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    around = {
        "bos_token": facts.flag("tokenizer.ggml.add_bos_token", begins),
        "eos_token": facts.flag("tokenizer.ggml.add_eos_token", False) or of_encoder,
    }
    ids = {name: tokens.index(named[name]) for name, is_wanted in around.items() if is_wanted and name in named}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **made,
        "post_processor": template(named, ids, **of_pairs(facts, model) if of_encoder else {}) if ids else None,
    }
    return {"tokenizer.json": description, "tokenizer_config.json": {**named, **chat_templates(facts)}}


def of_pairs(facts: Facts, model: str) -> dict[str, Any]:
    """How an encoder is given two texts: BERT is told which token is of which, others have two tokens between them."""
    if model == WORDS:
        return {"begins_second": False, "second_type": 1}
    return {"begins_second": False, "ends_first": 1 + facts.flag("tokenizer.ggml.add_sep_token", True)}


def token_of(facts: Facts, tokens: Sequence[str], name: str) -> str | None:
    """The token that has this role; None where there is none. CheckpointError for an id beyond the vocabulary."""
    token_id = facts.whole(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{facts.path}: the fact tokenizer.ggml.{name}_token_id is {token_id}, but there are {len(tokens)} tokens. "
            "Download the file again."
        )
    return tokens[token_id]


def byte_level(facts: Facts, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """(the parts of tokenizer.json, whether texts begin with a token unless the file says otherwise)."""
    merges = joins_said(facts)
    found = pre_tokenizer(facts)
    model = bpe(tokens, merges)
    model["ignore_merges"] = found.takes_whole
    made = {
        "normalizer": {"type": "NFC"} if found.composes else None,
        "pre_tokenizer": split_to_bytes(found.patterns),
        "model": model,
        "decoder": BYTES,
    }
    return made, found.begins


def joins_said(facts: Facts) -> list[list[str]]:
    """Two pieces each, in the order in which they are joined."""
    merges = [merge.split(" ") for merge in facts.texts("tokenizer.ggml.merges")]
    if wrong := next((merge for merge in merges if len(merge) != 2), None):
        raise CheckpointError(
            f"{facts.path}: the tokenizer joins {' '.join(wrong)[:80]!r}, which are not two pieces. Download the file "
            "again."
        )
    return merges


def pre_tokenizer(facts: Facts) -> PreTokenizer:
    name = facts.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{facts.path} splits texts in the way {name!r}, which is not known here. Known are "
            f"{', '.join(PRE_TOKENIZERS)}. Name the folder of the model's own tokenizer with the option tokenizer, or "
            "serve the safetensors version."
        )
    return PRE_TOKENIZERS[name]


def has_prefix(facts: Facts) -> bool:
    """Whether a text gets a space in front."""
    return facts.flag("tokenizer.ggml.add_space_prefix", True)


def sentencepiece(
    facts: Facts, tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[Sequence[str]], unknown: str | None
) -> dict[str, Any]:
    """The parts of tokenizer.json."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] = spaces
    if has_prefix(facts):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces]}
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = bpe(tokens, merges)
    model |= {"unk_token": unknown, "fuse_unk": True, "byte_fallback": BYTE in kinds}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "model": model,
        "decoder": {"type": "Sequence", "decoders": back},
    }


def joins(facts: Facts, tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Two pieces each that are a third, those of the best ones first. Bytes and control tokens are no pieces."""
    scores = scores_of(facts, tokens)
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED, UNUSED)}
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    found = []
    for i in order:
        token = tokens[i]
        if token in pieces and len(token) > 1:
            halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            found += [pair for pair in halves if pair[0] in pieces and pair[1] in pieces]
    return found


def scores_of(facts: Facts, tokens: Sequence[str]) -> list[float]:
    scores = facts.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{facts.path}: the tokenizer has {len(tokens)} tokens and {len(scores)} scores. Download the file again."
        )
    return scores


def likeliest_pieces(facts: Facts, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """The parts of tokenizer.json. What no piece has is less likely than the worst piece. Tokens that only fill the
    vocabulary up do not count there: they are as likely as that one. CheckpointError without an unknown token."""
    if UNKNOWN not in kinds:
        raise CheckpointError(f"{facts.path}: the tokenizer has no unknown token. Download the file again.")
    scores = scores_of(facts, tokens)
    least = min((score for score, kind in zip(scores, kinds, strict=True) if kind == NORMAL), default=0.0)
    letters = bytes(number % 256 for number in facts.numbers("tokenizer.ggml.precompiled_charsmap"))
    steps: list[dict[str, Any]] = []
    if letters:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(letters).decode()})
    if facts.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    steps += [{"type": "Prepend", "prepend": SPACE}] if has_prefix(facts) else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "model": {
            "type": "Unigram",
            "unk_id": [*kinds].index(UNKNOWN),
            "vocab": [[token, max(score, least)] for token, score in zip(tokens, scores, strict=True)],
            "byte_fallback": BYTE in kinds,
        },
        "decoder": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
    }


def chat_templates(facts: Facts) -> dict[str, Any]:
    """The model's chat template, and others that have names."""
    default = facts.text(TEMPLATE)
    others = {
        name.removeprefix(f"{TEMPLATE}."): text for name, text in facts.all.items() if name.startswith(f"{TEMPLATE}.")
    }
    if not others:
        return {} if default is None else {"chat_template": default}
    everything = {**({} if default is None else {"default": default}), **others}
    return {"chat_template": [{"name": name, "template": text} for name, text in everything.items()]}


def own_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[str]:
    """As the model's own list has them. A file has a letter for a space before beginnings of words, and nothing before
    what stands inside."""

    def own(token: str, kind: int) -> str:
        if kind == CONTROL:
            return token
        return token.removeprefix(SPACE) if token.startswith(SPACE) else INSIDE + token

    return [own(token, kind) for token, kind in zip(tokens, kinds, strict=True)]


def word_pieces(facts: Facts, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """What takes a text apart, of `own_tokens`. A file does not say whether capitals are made small: they are unless
    some token has one. CheckpointError without a token for what has none."""
    if UNKNOWN_WORD not in tokens:
        raise CheckpointError(f"{facts.path}: the tokenizer lacks the token {UNKNOWN_WORD}. Download the file again.")
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
            "unk_token": UNKNOWN_WORD,
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": 100,
            "vocab": {token: i for i, token in enumerate(tokens)},
        },
        "decoder": {"type": "WordPiece", "prefix": INSIDE, "cleanup": True},
    }
