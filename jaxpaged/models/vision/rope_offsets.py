"""Where the tokens of a prompt with pictures stand, in models that give a token three positions: in time, row, column.

A token of text has three times the same position, one after that of the token before it. A picture that begins at
position p has p, p + row and p + column, and the text behind it goes on at p + the longer of its sides (arXiv
2409.12191). The moments of a video that no text divides all begin at one p: they have p + time, p + row and p + column,
and the text behind them goes on behind the last position that any of them has. So a picture takes fewer positions than
it has tokens, and positions of all tokens behind it differ from their places in the prompt by a constant.

Host code: numpy only.
"""

from typing import Any

import numpy as np

from jaxpaged.models.vision.interface import Features


def rope_offsets(features: Features, num_prompt_tokens: int) -> tuple[np.ndarray, int]:
    """`Vision.rope_offsets`: int32 [3, num_prompt_tokens], what is added to each token's place in the prompt, and what
    is added to the places of all tokens behind the prompt."""
    offsets = np.zeros((3, num_prompt_tokens), np.int32)
    delta = end = position = extent = 0
    for start, feature in grids_of(features):
        _, rows, columns = feature.grid
        offsets[:, end:start] = delta
        end = start + rows * columns
        if not feature.moment:
            position, extent = start + delta, 0
        row, column = np.divmod(np.arange(rows * columns), columns)
        positions = position + np.stack([np.full_like(row, feature.time), row, column])
        offsets[:, start:end] = positions - np.arange(start, end)
        extent = max(extent, feature.time + 1, rows, columns)
        delta = position + extent - end
    offsets[:, end:] = delta
    return offsets, delta


def grids_of(features: Any) -> list[tuple[int, Any]]:
    """Of each grid of embeddings in the prompt, in order: where it begins, and its feature. One with several items has
    as many of them."""
    found = []
    for feature in features:
        _, rows, columns = feature.grid
        for start, length in feature.runs:
            found += [(first, feature) for first in range(start, start + length, rows * columns)]
    return found
