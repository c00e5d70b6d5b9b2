"""Checks of one value of a request: each raises RequestError that names the field, the value, and what it must be.

This module does not know which parameters there are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxpaged.errors import RequestError, check_unicode, shown
from jaxpaged.sampling_params.limits import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EXTRA_VALUES,
    MAX_LOGIT_BIAS_IDS,
)
from jaxpaged.sampling_params.structured_outputs import StructuredOutputsParams


def checked_float(
    name: str, value: Any, minimum: float = -math.inf, maximum: float = math.inf, above: float = -math.inf
) -> float:
    """`value` as a float, or RequestError."""
    if type(value) is float and minimum <= value <= maximum and above < value < math.inf:  # as nearly always
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} is {shown(value)}; it must be a number.", name)
    try:
        value = float(value)
    except OverflowError:
        value = math.inf if value > 0 else -math.inf
    if not math.isfinite(value):
        raise RequestError(f"{name} is {shown(value)}; it must be finite.", name)
    if value < minimum or value <= above:
        bound = f"more than {above:g}" if value <= above else f"at least {minimum:g}"
        raise RequestError(f"{name} is {shown(value)}; it must be {bound}.", name)
    if value > maximum:
        raise RequestError(f"{name} is {shown(value)}; it must be at most {maximum:g}.", name)
    return value


def check_int(name: str, value: Any, minimum: int, maximum: int, hint: str = "") -> None:
    if type(value) is int and minimum <= value <= maximum:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}; it must be a whole number.", name)
    if not minimum <= value <= maximum:
        bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
        raise RequestError(f"{name} is {shown(value)}; it must be {bound}{f' ({hint})' if hint else ''}.", name)


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be true or false.", name)


def check_count(name: str, count: int, minimum: int, maximum: int) -> None:
    if not minimum <= count <= maximum:
        bound = f"at least {minimum}" if count < minimum else f"at most {maximum}"
        raise RequestError(f"{name} has {count} entries; it must have {bound}.", name)


def checked_texts(name: str, value: Any) -> list[str]:
    """`value` as a list of non-empty texts."""
    if value is None or (type(value) is list and not value):
        return []
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} is {shown(value)}; it must be a text or a list of texts.", name)
    if "" in texts:
        raise RequestError(f"{name} is {shown(value)}; an empty text would match everywhere. Leave it out.", name)
    for text in texts:
        check_unicode(name, text)
    return list(texts)


def check_text_lengths(name: str, texts: list[str], maximum: int) -> None:
    """No text is so long that to cut it into tokens, or to look for it, would be work."""
    longest = max(map(len, texts), default=0)
    if longest > maximum:
        raise RequestError(f"one of {name} has {longest} characters; it must have at most {maximum}.", name)


def checked_ids(name: str, value: Any) -> list[int]:
    """`value` as a list of token ids, none of them negative."""
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {shown(value)}; it must be a list of token ids.", name)
    if set(map(type, value)) - {int} or (value and not 0 <= min(value) <= max(value) < 2**31):
        for token_id in value:  # there is a bad one, or one of a kind of its own: say which
            check_token_id(name, token_id)
    return list(value)


def check_token_id(name: str, token_id: Any) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31:
        raise RequestError(f"{name} contains {shown(token_id)}; it must contain whole numbers from 0.", name)


def check_ids_in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{name} contains token id {token_id}, but the vocabulary has {vocab_size} ids. "
                f"Use ids from 0 to {vocab_size - 1}.",
                name,
            )


def checked_bias(value: Any) -> dict[int, float]:
    """`value` as token id -> bias in [-100, 100]. JSON has only text as keys, so "17" is taken for 17."""
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias is {shown(value)}; it must map token ids to numbers.", "logit_bias")
    check_count("logit_bias", len(value), 0, MAX_LOGIT_BIAS_IDS)
    bias = {}
    for key, amount in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        check_token_id("logit_bias", token_id)
        bias[token_id] = min(max(checked_float("logit_bias", amount), -100.0), 100.0)
    return bias


def check_logprobs_limit(name: str, wanted: int | None, vocab_size: int, max_logprobs: int) -> None:
    if wanted is None:
        return
    count = vocab_size if wanted == -1 else wanted
    if count > max_logprobs:
        asked = f"-1, the whole vocabulary of {vocab_size}" if wanted == -1 else str(wanted)
        raise RequestError(
            f"{name} is {asked}, but this engine gives at most {max_logprobs}. "
            "Ask for fewer, or start the engine with a larger max_logprobs.",
            name,
        )


def check_bad_words_token_ids(words: list[list[int]], vocab_size: int) -> None:
    """The words as tokens fit the places that the sampler has for them."""
    hint = "Use fewer or shorter bad_words."
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words become {len(words)} token sequences, with and without a space before them; "
            f"at most {MAX_BAD_WORDS} are possible. {hint}",
            "bad_words",
        )
    for word in words:
        check_ids_in_vocabulary("bad_words", word, vocab_size)
        if not 1 <= len(word) <= MAX_BAD_WORD_LENGTH:
            raise RequestError(
                f"one of bad_words has {len(word)} tokens; 1 to {MAX_BAD_WORD_LENGTH} are possible. {hint}",
                "bad_words",
            )
    total = sum(map(len, words))
    if total > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words have {total} tokens together; at most {MAX_BAD_WORD_TOKENS} are possible. {hint}",
            "bad_words",
        )


def nothing_to_draw(fields: Sequence[str]) -> RequestError:
    """What a request is told whose fields leave no token that may come next."""
    *others, last = fields
    named = f"{', '.join(others)} and {last} contradict each other" if others else f"{last} cannot be met"
    return RequestError(
        f"{named}: no token can be drawn. Change {'one of them' if others else 'it'}. Other requests are unharmed.",
        fields[0],
    )


def checked_structured_outputs(value: Any) -> StructuredOutputsParams:
    """The parameters, or what a dict of their fields says."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise RequestError(
            f"structured_outputs is {shown(value)}; it must be StructuredOutputsParams, or a dict of its fields.",
            "structured_outputs",
        )
    return StructuredOutputsParams.from_dict(value)


def check_extra_args(value: Any) -> None:
    """A dict with text keys, of values that every wire format can carry, and not too many."""
    if not isinstance(value, dict):
        raise RequestError(f"extra_args is {shown(value)}; it must map names to values.", "extra_args")
    drafts = value.get("num_speculative_tokens", 0)
    if not isinstance(drafts, int | float) or isinstance(drafts, bool) or drafts < 0 or drafts % 1:
        raise RequestError(
            f"extra_args.num_speculative_tokens is {shown(drafts)}; it must be a whole number from 0.", "extra_args"
        )
    pending, count = [value], 0
    while pending:
        item = pending.pop()
        count += len(item) if isinstance(item, dict | list | tuple) else 0
        if count > MAX_EXTRA_VALUES:
            raise RequestError(f"extra_args has more than {MAX_EXTRA_VALUES} values. Send fewer.", "extra_args")
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                raise RequestError(f"extra_args has keys {shown(list(item))}; they must be text.", "extra_args")
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif isinstance(item, str):
            check_unicode("extra_args", item)
        elif isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise RequestError(f"extra_args contains {shown(item)}; whole numbers must fit 64 bits.", "extra_args")
        elif not isinstance(item, bytes | int | float | None):
            raise RequestError(
                f"extra_args contains {shown(item)}; use texts, numbers, lists and dicts of them.", "extra_args"
            )
