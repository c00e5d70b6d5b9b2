"""Prompts of pooling requests as token ids: one text or a pair, cut to a length with its special tokens kept.

An embedding model reads its result at a token that the tokenizer adds, so cutting happens before that: the end of a
text goes, as transformers does it. This module knows no requests.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.engine.input.tokenizer import Tokenizer, enough_text
from jaxpaged.errors import RequestError


def check_keep(keep: Any, most: int) -> int | None:
    """The length to cut to; -1 stands for `most`. Raises RequestError for what is no length."""
    if keep is None:
        return None
    if isinstance(keep, bool) or not isinstance(keep, int) or (keep < 1 and keep != -1) or keep > most:
        raise RequestError(
            f"truncate_prompt_tokens is {keep!r}; it must be from 1 to max_model_len = {most}, or -1 for that.",
            "truncate_prompt_tokens",
        )
    return most if keep == -1 else keep


def cut_ids(token_ids: Sequence[int], keep: int | None, from_left: bool = False) -> list[int]:
    """The first `keep` ids, or the last ones when cut `from_left`. None: all."""
    if keep is None:
        return list(token_ids)
    return list(token_ids[-keep:] if from_left else token_ids[:keep])


def text_ids(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    keep: int | None,
    add_special_tokens: bool = True,
    from_left: bool = False,
) -> list[int]:
    """The ids of a text, or of a pair of texts, of which at most `keep` are left, special tokens included.

    Of a pair the longer one is cut first. Only what may be left is tokenised. Raises RequestError when nothing is left,
    or when the text has no tokens.
    """
    backend = tokenizer.backend
    if keep is not None:
        texts = [enough_text(tokenizer, text, keep, from_left) for text in texts]
    plain = [tokenizer.encoding(text, add_special_tokens=False) for text in texts]
    if keep is not None:
        num_special = backend.num_special_tokens_to_add(len(texts) == 2) if add_special_tokens else 0
        direction = "left" if from_left else "right"
        for encoding, length in zip(plain, lengths_within([len(each) for each in plain], keep - num_special)):
            encoding.truncate(length, direction=direction)
    pair = plain[1] if len(plain) == 2 else None
    ids = backend.post_process(plain[0], pair, add_special_tokens).ids
    if not ids:
        raise RequestError("the text has no tokens, or none is left. Give it at least one.", "prompt")
    return ids


def lengths_within(lengths: Sequence[int], total: int) -> list[int]:
    """The lengths cut down to `total` together, the longer first."""
    total = max(total, 0)
    if sum(lengths) <= total:
        return list(lengths)
    if len(lengths) == 1:
        return [total]
    shorter = min(min(lengths), total // 2)
    first_is_shorter = lengths[0] <= lengths[1]
    return [shorter, total - shorter] if first_is_shorter else [total - shorter, shorter]
