"""From samples to rows of tokens, several short samples packed per row."""

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from demo_model.corpus import Sample


class Batch(NamedTuple):
    """All arrays are [rows, length]; segment 0 is padding.

    ``targets`` is the next token and ``weights`` its share in the loss.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray


Encoded = tuple[np.ndarray, np.ndarray]


def encode(tokenizer: Tokenizer, sample: Sample) -> Encoded:
    """Token numbers and weights of a sample, piece by piece.

    Pieces end where a prompt would, so the tokens of an answer do not depend
    on the text before it, just as in generation.
    """
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in sample:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [weight] * len(piece)
    return np.array(ids, np.int32), np.array(weights, np.float32)


def empty_batch(rows: int, length: int) -> Batch:
    return Batch(
        np.zeros((rows, length), np.int32),
        np.zeros((rows, length), np.int32),
        np.zeros((rows, length), np.float32),
        np.zeros((rows, length), np.int32),
    )


def place(batch: Batch, row: int, start: int, sample: Encoded, segment: int) -> int:
    """Write a sample into a row and return where the next one may start."""
    ids, weights = sample
    stop = start + len(ids) - 1
    batch.tokens[row, start:stop] = ids[:-1]
    batch.targets[row, start:stop] = ids[1:]
    batch.weights[row, start:stop] = weights[1:]
    batch.segments[row, start:stop] = segment
    return stop


class Packer:
    """Fills batches from an endless source of encoded samples.

    Up to ``shelf`` samples wait for a row with enough room, which leaves few
    padding tokens; a sample longer than a row is dropped.
    """

    def __init__(self, source: Callable[[], Encoded], shelf: int = 16):
        self._source = source
        self._shelf = shelf
        self._waiting: list[Encoded] = []

    def _take(self, room: int, length: int) -> Encoded | None:
        while len(self._waiting) < self._shelf:
            sample = self._source()
            if len(sample[0]) - 1 <= length:
                self._waiting.append(sample)
        for index, sample in enumerate(self._waiting):
            if len(sample[0]) - 1 <= room:
                return self._waiting.pop(index)
        return None

    def batch(self, rows: int, length: int) -> Batch:
        batch = empty_batch(rows, length)
        for row in range(rows):
            start, segment = 0, 1
            while sample := self._take(length - start, length):
                start = place(batch, row, start, sample, segment)
                segment += 1
        return batch


def sample_source(
    tokenizer: Tokenizer, rng: random.Random, make: Callable[[random.Random], Sample]
) -> Callable[[], Encoded]:
    """An endless source of encoded samples for a packer."""
    return lambda: encode(tokenizer, make(rng))
