"""Text of random tokens that has a wanted number of tokens.

Tokens do not survive the way to text and back: the text of some becomes other tokens, more or fewer. So text is cut and
lengthened until its length is right. This module knows no dataset.
"""

from collections.abc import Sequence

import numpy as np

from jaxpaged.engine.input.tokenizer import Tokenizer

MOST_TRIES = 10


class RandomText:
    """Draws text from a vocabulary without its special tokens; the same seed draws the same."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        size = tokenizer.backend.get_vocab_size(with_added_tokens=False)
        self.allowed = np.array([each for each in range(size) if each not in tokenizer.special_ids])
        self.num_off = 0
        """Tokens, in all texts, by which lengths are not as wanted."""

    def draw(self, length: int) -> list[int]:
        """Tokens, each drawn alone."""
        return self.allowed[self.rng.integers(0, len(self.allowed), length)].tolist()

    def sequence(self, offset: int, length: int) -> list[int]:
        """Tokens that follow each other in the vocabulary."""
        return self.allowed[(offset + np.arange(length)) % len(self.allowed)].tolist()

    def settle(self, token_ids: Sequence[int], length: int) -> tuple[str, list[int]]:
        """A text of `length` tokens that begins as `token_ids` say, and the tokens that it becomes.

        Once in a while no text is found; then it has some tokens more or fewer.
        """
        tokens = list(token_ids)[:length]
        text = self._tokenizer.decode(tokens)
        for _ in range(MOST_TRIES):
            text = self._tokenizer.decode(tokens)
            found = self._tokenizer.encode(text, add_special_tokens=False)
            if len(found) == length:
                return text, found
            tokens = found[:length] if len(found) > length else found + self.draw(length - len(found))
        found = self._tokenizer.encode(text, add_special_tokens=False)
        self.num_off += abs(len(found) - length)
        return text, found
