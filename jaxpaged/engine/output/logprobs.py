"""Log probabilities as users see them: token id -> `Logprob` with rank and text.

This module knows nothing of how they were computed.
"""

from collections.abc import Sequence
from typing import Any

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.token_texts import TokenTexts
from jaxpaged.messages import Logprob, ProcessedLogprob, TokenLogprobs
from jaxpaged.sampling_params import SamplingParams


class SequenceLogprobs:
    """Log probabilities of the tokens of one output, and their sum."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams):
        self._texts = wanted_texts(tokenizer, prompt_token_ids, params)
        self._limit = None if params.logprobs == -1 else params.logprobs
        self._ranked = params.logprob_token_ids is None
        self.cumulative = 0.0
        self.positions: list[dict[int, Logprob]] = []
        self.processed: list[ProcessedLogprob] = []  # none, or of each position

    def push(self, line: TokenLogprobs) -> None:
        """Add one position; the first candidate of the line is the sampled token."""
        self.positions.append(candidates(line, self._texts, self._limit, self._ranked))
        self.cumulative += line.logprobs[0]

    def finish(self) -> None:
        """No more tokens come: what the text ends with besides is the last token's that is part of it."""
        if self._texts is None or not (rest := self._texts.flush()):
            return
        for candidates in reversed(self.positions):
            token_id = next(iter(candidates))
            if not self._texts.is_silent(token_id):
                last = candidates[token_id]
                candidates[token_id] = Logprob(last.logprob, last.rank, f"{last.decoded_token}{rest}")
                return


def wanted_texts(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> TokenTexts | None:
    """The texts of tokens that continue a prompt; None where no text is wanted."""
    if not params.detokenize:
        return None
    return TokenTexts(tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens)


def candidates(
    line: TokenLogprobs, texts: TokenTexts | None, limit: int | None, ranked: bool = True
) -> dict[int, Logprob]:
    """One position as a dict: the sampled token, then up to `limit` others (None: all) in the order given.

    `ranked`: the others are the most likely tokens, so the order is their rank. `texts` move on by the sampled token;
    without them there is no text.
    """
    end = len(line.token_ids) if limit is None else 1 + limit
    found: dict[int, Logprob] = {}
    for place, (token_id, logprob) in enumerate(zip(line.token_ids[:end], line.logprobs[:end], strict=True)):
        if token_id in found:  # the sampled token is among the most likely ones
            continue
        rank = line.rank if place == 0 else place if ranked else None
        found[token_id] = Logprob(logprob, rank, None if texts is None else texts.of(token_id))
    if texts is not None:
        texts.advance(line.token_ids[0])
    return found


class LatePromptLogprobs:
    """What `prompt_logprob_dicts` makes, made when it is read, off the step path: 80,000 entries for 20 of each
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
    """An entry per prompt token. The first is None: nothing comes before it; so are those that nobody asked for."""
    limit = None if params.prompt_logprobs == -1 else params.prompt_logprobs
    num_without = len(prompt_token_ids) - len(lines)
    texts = wanted_texts(tokenizer, [], params)
    if texts is not None:
        for token_id in prompt_token_ids[:num_without]:
            texts.advance(token_id)
    return [*[None] * num_without, *(candidates(line, texts, limit) for line in lines)]
