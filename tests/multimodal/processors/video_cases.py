"""Videos whose sizes and times transformers computed, too: the same here and when goldens are made."""

import numpy as np


def sizes() -> list[tuple[int, int, int, int, int]]:
    """Frames, width, height, fewest and most pixels."""
    rng, cases = np.random.default_rng(3), []
    while len(cases) < 120:
        frames, side = int(rng.integers(2, 40)), 2 ** rng.uniform(4, 12, 2)
        width, height = (int(each) for each in side)
        fewest, more = (int(each) for each in 2 ** rng.uniform(10, 24, 2))
        if max(width, height) < 50 * min(width, height):
            cases.append((frames, width, height, fewest, fewest + more))
    return cases


def times() -> list[tuple[list[int], float]]:
    """Places of frames in their videos, and frames a second."""
    rng = np.random.default_rng(4)
    return [
        (np.cumsum(rng.integers(1, 60, count)).tolist(), float(rng.choice([1.0, 2.0, 23.976, 24.0, 30.0])))
        for count in (1, 2, 3, 4, 5, 8, 9, 30)
    ]
