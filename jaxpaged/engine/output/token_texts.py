"""The texts of single tokens, each where it stands: those of a sequence join to its text.

What a token adds depends on the tokens before it: a first word has no space, a character of several tokens appears with
its last one. So each is decoded by the stream that makes the text, and a token that might have come instead by a copy
of it. This module knows no probabilities.
"""

from collections.abc import Sequence

from jaxpaged.engine.input.tokenizer import Tokenizer
from jaxpaged.engine.output.detokenizer import TextStream


class TokenTexts:
    """The texts that tokens have as the next one of a sequence that continues a prompt.

    A special token that the text leaves out has its name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        self._stream = TextStream(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        self._names = {i: tokenizer.added_tokens[i] for i in tokenizer.special_ids} if skip_special_tokens else {}

    def of(self, token_id: int) -> str:
        """The text of a token, were it the next."""
        stream = self._stream
        if stream.settled and (piece := stream.plain[token_id]):  # as of most, and of no special token
            return piece
        name = self._names.get(token_id)
        return stream.peek(token_id) if name is None else name

    def advance(self, token_id: int) -> None:
        """It is the next."""
        self._stream.push(token_id)

    def is_silent(self, token_id: int) -> bool:
        """Whether the text leaves a token out."""
        return token_id in self._names

    def flush(self) -> str:
        """What the text ends with besides, when no more tokens come."""
        return self._stream.flush()


def texts_of(tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    """The texts of all tokens of a text, from its beginning."""
    texts, found = TokenTexts(tokenizer, [], skip_special_tokens), []
    for token_id in token_ids:
        found.append(texts.of(token_id))
        texts.advance(token_id)
    return found
