"""Log probabilities in the shapes of the API: one for chats, another for completions, a third for prompts.

JSON has no minus infinity: it is written as -9999.
"""

from collections.abc import Sequence

import msgspec

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.messages import Logprob

LEAST = -9999.0

Candidates = dict[int, Logprob]
"""The candidates of one position by token id, the sampled one first."""


class TopLogprob(msgspec.Struct):
    """One candidate. `bytes` is its text in UTF-8; of a token that is a part of a character they are its own, while the
    character is the text of its last one."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    """A token of the output and the candidates that were likely there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a chat's answer, an entry per token."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion: lists that run in parallel, an entry per token.

    `text_offset` counts characters from the beginning of the choice's text. A special token that the text leaves out
    has its name in `tokens`, and no length. The first token of an echoed prompt has no probability: nothing comes
    before it.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def shown(token_id: int, candidate: Logprob, as_ids: bool) -> str:
    """A token's text, or `token_id:N` where the client asked for that."""
    return f"token_id:{token_id}" if as_ids else candidate.decoded_token or ""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], positions: Sequence[Candidates], top: int, as_ids: bool
) -> ChatLogprobs:
    """`top` candidates per position, in the engine's order: the sampled token first. -1: all."""
    content = []
    for token_id, candidates in zip(token_ids, positions):
        tops = [top_logprob(tokenizer, i, candidate, as_ids) for i, candidate in candidates.items()]
        sampled = top_logprob(tokenizer, token_id, candidates[token_id], as_ids)
        content.append(TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, tops if top == -1 else tops[:top]))
    return ChatLogprobs(content)


def top_logprob(tokenizer: Tokenizer, token_id: int, candidate: Logprob, as_ids: bool) -> TopLogprob:
    own_bytes = tokenizer.bytes_of(token_id, candidate.decoded_token or "")
    return TopLogprob(shown(token_id, candidate, as_ids), max(candidate.logprob, LEAST), list(own_bytes))


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[Candidates | None],
    texts: Sequence[str],
    offsets: Sequence[int],
    as_ids: bool,
) -> CompletionLogprobs:
    """The candidates that the engine gave, at most one more than were asked for, of tokens with these texts, which
    begin at `offsets`."""
    result = CompletionLogprobs([], [], [], [])
    for token_id, candidates, text, offset in zip(token_ids, positions, texts, offsets):
        own = None if candidates is None else candidates[token_id]
        result.text_offset.append(offset)
        result.tokens.append(f"token_id:{token_id}" if as_ids else text)
        result.token_logprobs.append(None if own is None else max(own.logprob, LEAST))
        result.top_logprobs.append(None if candidates is None else top_by_text(tokenizer, candidates, as_ids))
    return result


def top_by_text(tokenizer: Tokenizer, candidates: Candidates, as_ids: bool) -> dict[str, float]:
    """By text, of which the likeliest candidate wins where several have the same. Of parts of characters, which have no
    text, all but the first are shown by their bytes."""
    by_text: dict[str, float] = {}
    for token_id, candidate in candidates.items():
        text = shown(token_id, candidate, as_ids)
        if not text and "" in by_text:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.bytes_of(token_id, text))
        by_text.setdefault(text, max(candidate.logprob, LEAST))
    return by_text


def prompt_logprobs(positions: Sequence[Candidates | None]) -> list[dict[int, Logprob] | None]:
    """As the engine has them, without infinities."""
    return [None if each is None else {i: finite(candidate) for i, candidate in each.items()} for each in positions]


def finite(candidate: Logprob) -> Logprob:
    if candidate.logprob >= LEAST:
        return candidate
    return Logprob(LEAST, candidate.rank, candidate.decoded_token)
