"""Log probabilities as users see them: token id -> `Logprob` with rank and text.

This module knows nothing of how they were computed.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.messages import Logprob, TokenLogprobs
from jaxpaged.sampling_params import SamplingParams


class SequenceLogprobs:
    """Log probabilities of the tokens of one output, and their sum."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams):
        self._tokenizer = tokenizer
        self._context = list(prompt_token_ids[-4:])  # for characters of several tokens
        self._limit = None if params.logprobs == -1 else params.logprobs
        self._ranked = params.logprob_token_ids is None
        self._detokenize = params.detokenize
        self.cumulative = 0.0
        self.positions: list[dict[int, Logprob]] = []

    def push(self, line: TokenLogprobs) -> None:
        """Add one position; the first candidate of the line is the sampled token."""
        tokenizer = self._tokenizer if self._detokenize else None
        self.positions.append(candidates(line, tokenizer, self._context, self._limit, self._ranked))
        self.cumulative += line.logprobs[0]
        self._context = [*self._context[-3:], line.token_ids[0]]


def candidates(
    line: TokenLogprobs, tokenizer: Tokenizer | None, context: Sequence[int], limit: int | None, ranked: bool = True
) -> dict[int, Logprob]:
    """One position as a dict: the sampled token, then up to `limit` others (None: all) in the order given.

    `ranked`: the others are the most likely tokens, so the order is their rank. Without a tokenizer there is no text.
    """
    end = len(line.token_ids) if limit is None else 1 + limit
    found: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(line.token_ids[:end], line.logprobs[:end], strict=True)):
        if token_id in found:  # the sampled token is among the most likely ones
            continue
        rank = line.rank if place == 0 else place if ranked else None
        text = None if tokenizer is None else tokenizer.piece(token_id, context)
        found[token_id] = Logprob(logprob, rank, text)
    return found


class LatePromptLogprobs:
    """What `prompt_logprob_dicts` makes, made when it is read, by whoever has the time: 80,000 entries for 20 of each
    of 3,900 tokens."""

    def __init__(self, *arguments: Any):
        self._arguments = arguments
        self._dicts: list[dict[int, Logprob] | None] | None = None

    def read(self) -> list[dict[int, Logprob] | None]:
        if self._dicts is None:
            self._dicts = prompt_logprob_dicts(*self._arguments)
        return self._dicts


def prompt_logprob_dicts(
    lines: Sequence[TokenLogprobs], tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
) -> list[dict[int, Logprob] | None]:
    """An entry per prompt token. The first is None: nothing comes before it."""
    limit = None if params.prompt_logprobs == -1 else params.prompt_logprobs
    named = tokenizer if params.detokenize else None
    dicts: list[dict[int, Logprob] | None] = [None]
    for position, line in enumerate(lines, start=1):
        dicts.append(candidates(line, named, prompt_token_ids[max(0, position - 4) : position], limit))
    return dicts
