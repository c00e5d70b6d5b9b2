"""From results of the engine to what a completion shows: text, tokens and log probabilities, the prompt before them if
it is echoed.

This module knows neither HTTP nor streams; it is given new tokens, or all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.entrypoints.http.openai.logprobs import Candidates, CompletionLogprobs, completion_logprobs
from jaxpaged.messages import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class CompletionStyle:
    """What the request wants to see. `only_echo`: the prompt and nothing of what the engine had to compute."""

    logprobs: bool
    echo: bool
    only_echo: bool
    as_token_ids: bool

    def num_dropped(self, output: RequestOutput) -> int:
        """Tokens of a result that the client does not get."""
        return sum(len(each.token_ids) for each in output.outputs) if self.only_echo else 0


@dataclass(frozen=True)
class Shown:
    """A piece of one sequence as the client sees it."""

    text: str
    token_ids: Sequence[int]
    logprobs: CompletionLogprobs | None


class SequenceText:
    """One sequence of a completion; pieces come in order, and the first one has the echo."""

    def __init__(self, style: CompletionStyle, tokenizer: Tokenizer):
        self._style = style
        self._tokenizer = tokenizer
        self._offset = 0  # characters of tokens shown so far
        self._begun = False

    def show(self, output: RequestOutput, completion: CompletionOutput) -> Shown:
        """The next piece, or the whole of a final result."""
        style = self._style
        text, token_ids = completion.text, completion.token_ids
        positions: Sequence[Candidates | None] = completion.logprobs or ()
        texts: Sequence[str] = ()
        if style.only_echo:
            text, token_ids, positions = "", [], ()
        if style.echo and not self._begun:
            prompt_ids = output.prompt_token_ids
            text = self._prompt_text(output) + text
            token_ids = [*prompt_ids, *token_ids]
            positions = [*(output.prompt_logprobs or [None] * len(prompt_ids)), *positions]
            texts = [self._tokenizer.piece(token_id) for token_id in prompt_ids]
        self._begun = True
        return Shown(text, token_ids, self._logprobs(token_ids, positions, texts) if style.logprobs else None)

    def _prompt_text(self, output: RequestOutput) -> str:
        """As it was given; ids are turned into text."""
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids)

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[Candidates | None], texts: Sequence[str]
    ) -> CompletionLogprobs:
        shown = completion_logprobs(token_ids, positions, self._style.as_token_ids, offset=self._offset, texts=texts)
        self._offset += sum(map(len, shown.tokens))
        return shown
