"""What the sampling parameters of a request come to with a model: words in its tokens, its marks of thinking, and what
cannot be met."""

from collections.abc import Iterable, Mapping, Sequence

from jaxpaged.engine.input.no_tokenizer import refuse
from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.errors import RequestError
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.checks import nothing_to_draw
from jaxpaged.sampling_params.limits import MAX_TOP_K_WITH_MASK


def check_some_token_is_left(params: SamplingParams, stop_ids: Sequence[int]) -> None:
    """Raise RequestError, naming all fields, where the only tokens that may be drawn are ones that may not be first."""
    assert params.allowed_token_ids is not None, "all tokens may be drawn"
    left, fields = set(params.allowed_token_ids), ["allowed_token_ids"]
    words = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    for name, banned in (("bad_words", words), ("min_tokens", set(stop_ids) if params.min_tokens else set())):
        if left & banned:
            left, fields = left - banned, [*fields, name]
    if not left:
        raise nothing_to_draw(fields)


def check_mask(top_k: int) -> None:
    """Raise RequestError where limits may leave too many tokens to tell of."""
    if not 1 <= top_k <= MAX_TOP_K_WITH_MASK:
        raise RequestError(
            f"top_k is {top_k}, but this engine tells which tokens limits leave (return_sampling_mask), which may be "
            f"any number of them. Give top_k from 1 to {MAX_TOP_K_WITH_MASK}, or no limit of any kind.",
            "top_k",
        )


def check_without_text(params: SamplingParams) -> None:
    """Raise RequestError for a parameter that needs text, where there is none."""
    for name in ("stop", "bad_words", "structured_outputs", "thinking_token_budget"):
        if getattr(params, name) not in (None, []):
            refuse(name, name)


def check_experts_start(start: int, length: int | None) -> None:
    """Raise RequestError where experts cannot be told from this token of the prompt on. `length` None: none are."""
    name = "routed_experts_prompt_start"
    if length is None:
        what = f"{name} is {start}, but this engine tells no experts. Start it with enable_return_routed_experts."
        raise RequestError(what, name)
    if start >= length:
        raise RequestError(f"{name} is {start}, but the prompt has {length} tokens. Make it less.", name)


def check_trace(num_tokens: int, room: int | None) -> None:
    """Raise RequestError where given tokens cannot come. `room`: for how many there is; None: tokens are drawn."""
    name = "trace_decode_token_ids"
    if room is None:
        raise RequestError(f"{name} is given, but this engine draws tokens. Start it with enable_trace_replay.", name)
    if num_tokens > room:
        raise RequestError(
            f"{name} has {num_tokens} tokens, but behind this prompt there is room for {room} until max_model_len. "
            "Shorten one of them, or raise max_model_len.",
            name,
        )


def put_in_tokens(
    params: SamplingParams,
    tokenizer: Tokenizer,
    thinking: tuple[int, int] | None,
    prompt_ids: Sequence[int],
    ending: str | None,
) -> None:
    """Fill in, in tokens, what parameters say in words. `thinking`: those that begin and end it, if there are some.
    `ending`: what decides whether the prompt leaves the model thinking, where it is not all of it.

    Raises RequestError where a budget for thinking has none.
    """
    if params.bad_words:
        params.bad_words_token_ids = words_in_tokens(tokenizer, params.bad_words)
    if params.thinking_token_budget is not None:
        start_end = budget_tokens(params.thinking_token_budget, thinking)
        ids = prompt_ids if ending is None else tokenizer.encode(ending, False)
        params.thinking_token_ids, params.is_thinking = start_end, leaves_open(ids, *start_end)


BORDERS = ("\n", "(")
"""Texts behind which a word is written as it is, by tokenizers that put a space before the first word of a text."""


def words_in_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Every word as it is written inside a text, with and without a space before it."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for written in (bare, f" {bare}"):
            sequences[tuple(ids_inside(tokenizer, written))] = None
    return [list(ids) for ids in sequences]


def ids_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that is not the first: those behind a border, where that stays a token of its own."""
    for border in BORDERS:
        before = tokenizer.encode(border, add_special_tokens=False)
        ids = tokenizer.encode(border + text, add_special_tokens=False)
        if before and ids[: len(before)] == before and len(ids) > len(before):
            return ids[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)


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
