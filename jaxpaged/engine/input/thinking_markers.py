"""The tokens between which a model thinks, as far as they can be told from its vocabulary.

A tokenizer that has such a pair among its added tokens was made for a model that thinks. This module knows no template.
"""

from collections.abc import Mapping, Sequence

from jaxpaged.errors import RequestError

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


def thinking_token_ids(added_tokens: Mapping[int, str]) -> tuple[int, int] | None:
    """The tokens that begin and end thinking. `added_tokens` are those outside the vocabulary's model."""
    ids = {text: token_id for token_id, text in added_tokens.items()}
    return next(((ids[start], ids[end]) for start, end in PAIRS if start in ids and end in ids), None)


def leaves_open(token_ids: Sequence[int], start_id: int, end_id: int) -> bool:
    """Whether a model that goes on behind these tokens is thinking."""
    markers = (token_id for token_id in reversed(token_ids) if token_id in (start_id, end_id))
    return next(markers, end_id) == start_id


def budget_tokens(budget: int, found: tuple[int, int] | None) -> tuple[int, int]:
    """The same for a request with a budget. Raises RequestError when there are none."""
    if found is None:
        pairs = ", ".join(" and ".join(pair) for pair in PAIRS)
        raise RequestError(
            f"thinking_token_budget is {budget}, but the vocabulary has no tokens that begin and end thinking, such as "
            f"{pairs}. Leave it out.",
            "thinking_token_budget",
        )
    return found
