"""Prompts of pooling requests as token ids: one text or a pair, cut to a length with its special tokens kept.

An embedding model reads its result at a token that the tokenizer adds, so cutting happens before that: the end of a
text goes, as transformers does it. This module knows no requests.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding

from jaxpaged.engine.input.tokenizer import Tokenizer, enough_text
from jaxpaged.engine.pooling.pooler import Pooler
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
    """The ids of `encoded_texts`."""
    return encoded_texts(tokenizer, texts, keep, add_special_tokens, from_left).ids


def pair_prompt(tokenizer: Tokenizer, pooler: Pooler, pair: tuple[str, str], keep: int | None) -> dict[str, Any]:
    """A pair of texts as a prompt, which says of each token of which text it is, if the model is told. Raises what
    `encoded_texts` does."""
    encoding = encoded_texts(tokenizer, pair, keep)
    return {"prompt_token_ids": encoding.ids, "token_type_ids": told_types(pooler, encoding)}


def told_types(pooler: Pooler, encoding: Encoding) -> list[int] | None:
    """Of which text each token is, where the model is told and there are two."""
    return encoding.type_ids if pooler.type_stride and any(encoding.type_ids) else None


def encoded_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    keep: int | None,
    add_special_tokens: bool = True,
    from_left: bool = False,
) -> Encoding:
    """A text, or a pair of texts, as tokens, of which at most `keep` are left, special tokens included.

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
    encoding = backend.post_process(plain[0], pair, add_special_tokens)
    if not encoding.ids:
        raise RequestError("the text has no tokens, or none is left. Give it at least one.", "prompt")
    return encoding


def with_types(token_ids: list[int], types: Any, num_given: int, pooler: Pooler | None) -> list[int]:
    """Ids with those of a second text moved up, as a model finds them that is told of which text a token is.

    `types` has 0 or 1 for each of the `num_given` ids, of which the first ones are left. Raises RequestError for other
    ones, and where the model is not told.
    """
    if pooler is None or not pooler.type_stride:
        raise RequestError("token_type_ids is given, but this model is told of no second text. Leave it out.", "prompt")
    if (
        not isinstance(types, list)
        or len(types) != num_given
        or any(type(t) is not int or t not in (0, 1) for t in types)
    ):
        raise RequestError(
            f"token_type_ids must be a list of 0 and 1, one for each of the {num_given} prompt_token_ids.", "prompt"
        )
    return [token_id + kind * pooler.type_stride for token_id, kind in zip(token_ids, types)]


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
