"""Ends thinking after as many tokens as a request allows: then only the token that ends it may be sampled.

The end is due by tokens that come back after later steps were scheduled. So a step gets a mask as soon as the end might
be due, and the mask is made when all tokens before it are known. Steps in which the end cannot be due have no mask.
This module knows no grammar and no device.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxpaged.core.grammar.matcher import Matcher


class BudgetMatcher:
    """Where one request stands in its thinking, and in its grammar if it has one: what that allows is all there is.

    `start_id` and `end_id` are the tokens around thinking, of which an answer may have several parts. `is_thinking`:
    the prompt left one open, which goes on, but only tokens of the answer count.
    """

    def __init__(self, budget: int, start_id: int, end_id: int, is_thinking: bool, inner: Matcher | None = None):
        self._budget, self._start_id, self._end_id, self._inner = budget, start_id, end_id, inner
        # Tokens of the part that is being thought; None: it is not thinking.
        self._num_thought: int | None = 0 if is_thinking else None

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    @property
    def is_complete(self) -> bool:
        return self._inner is not None and self._inner.is_complete

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Move on. False: a token did not fit the grammar."""
        for token_id in token_ids:
            self._num_thought = self._thought_with(token_id, self._num_thought)
        return self._inner is None or self._inner.accept(token_ids)

    def _thought_with(self, token_id: int, num_thought: int | None) -> int | None:
        if token_id == self._end_id:
            return None
        if num_thought is not None:
            return num_thought + 1
        return 0 if token_id == self._start_id else None

    def num_free(self, num_unknown: int) -> int:
        """How many tokens certainly need no mask after `num_unknown` that were drawn and are not known yet."""
        if self._inner is not None:
            return self._inner.num_free(num_unknown)
        thought = -1 if self._num_thought is None else self._num_thought  # the next one may begin to think
        return max(self._budget - thought - num_unknown, 0)

    def fill(self, bits_IW: np.ndarray, token_ids: Sequence[int] = ()) -> None:
        """Write which tokens may come next, and behind each of `token_ids`, as `Matcher.fill` does."""
        if self._inner is None:
            bits_IW[: len(token_ids) + 1] = np.uint32(0xFFFFFFFF)
        else:
            self._inner.fill(bits_IW, token_ids)
        word, bit = self._end_id // 32, np.uint32(1 << (self._end_id % 32))
        for num_thought, bits_W in zip(self._thought_along(token_ids), bits_IW):
            if num_thought is not None and num_thought >= self._budget and bits_W[word] & bit:
                bits_W[:] = 0
                bits_W[word] = bit

    def _thought_along(self, token_ids: Sequence[int]) -> Iterator[int | None]:
        num_thought = self._num_thought
        yield num_thought
        for token_id in token_ids:
            num_thought = self._thought_with(token_id, num_thought)
            yield num_thought
