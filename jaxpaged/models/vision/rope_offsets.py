"""Where the tokens of a prompt with pictures stand, in models that give a token three positions: in time, row, column.

A token of text has three times the same position, one after that of the token before it. A picture that begins at
position p has p, p + row and p + column, and the text behind it goes on at p + the longer of its sides
(arXiv 2409.12191). So a picture takes fewer positions than it has tokens, and positions of all tokens behind it differ
from their places in the prompt by a constant.

Host code: numpy only.
"""

from typing import Any

import numpy as np

from jaxpaged.models.vision.interface import Features


def rope_offsets(features: Features, num_prompt_tokens: int) -> tuple[np.ndarray, int]:
    """`Vision.rope_offsets`: int32 [3, num_prompt_tokens], what is added to each token's place in the prompt, and what
    is added to the places of all tokens behind the prompt."""
    offsets = np.zeros((3, num_prompt_tokens), np.int32)
    delta = end = 0
    for start, cells, columns in pictures_of(features):
        offsets[:, end:start] = delta
        end = start + cells
        cell = np.arange(cells)
        row, column = np.divmod(cell, columns)
        offsets[:, start:end] = delta + np.stack([-cell, row - cell, column - cell])
        delta += max(cells // columns, columns) - cells
    offsets[:, end:] = delta
    return offsets, delta


def pictures_of(features: Any) -> list[tuple[int, int, int]]:
    """Of each grid of embeddings in the prompt, in order: where it begins, how many embeddings it has, and columns. A
    feature with several items has as many of them."""
    found = []
    for feature in features:
        _, rows, columns = feature.grid
        cells = rows * columns
        for start, length in feature.runs:
            found += [(first, cells, columns) for first in range(start, start + length, cells)]
    return found
