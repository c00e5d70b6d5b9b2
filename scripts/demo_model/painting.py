"""A process that draws rows of training ahead. Knows no JAX, so it starts at once.

    python -m demo_model.painting FILE NUMBER OF NAME TOKENIZER

A chunk is a fixed number of rows. Painters and trainer map a file of slots, each of which has room for a chunk and a
mark: a painter fills its own slots and marks them, the trainer copies them and takes the mark away.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_model.corpus import stream
from demo_model.rows import Look, Rows, draw_rows, encoder

CHUNK_ROWS = 64
SLOTS = 4  # of each painter
PAUSE = 0.002  # seconds


def leaves_of(rows: Rows) -> list[np.ndarray]:
    return [*rows[:-1], *rows.look]


def rows_of(leaves: list[np.ndarray]) -> Rows:
    ends = len(Rows._fields) - 1
    return Rows(*leaves[:ends], Look(*leaves[ends:]))


def slots_of(path: Path, painters: int, example: Rows) -> np.memmap:
    """Slot s is that of painter s % painters. Fields `marked`, and `leaf0` and so on."""
    leaves = leaves_of(example)
    arrays = [(f"leaf{i}", leaf.dtype, leaf.shape) for i, leaf in enumerate(leaves)]
    return np.memmap(path, np.dtype([("marked", "u1"), *arrays]), "r+", shape=(SLOTS * painters,))


def paint(path: Path, number: int, painters: int, name: str, tokenizer: Path) -> None:
    encode, rng, parent = (
        encoder(Tokenizer.from_file(str(tokenizer))),
        stream(0, f"{name}, painter {number}"),
        os.getppid(),
    )
    rows = draw_rows(rng, encode, CHUNK_ROWS)
    slots = slots_of(path, painters, rows)
    while True:
        for slot in range(number, SLOTS * painters, painters):
            while slots["marked"][slot]:
                time.sleep(PAUSE)
                if os.getppid() != parent:
                    return
            for i, leaf in enumerate(leaves_of(rows)):
                slots[f"leaf{i}"][slot] = leaf
            slots["marked"][slot] = 1
            rows = draw_rows(rng, encode, CHUNK_ROWS)


if __name__ == "__main__":
    file, number, painters, name, tokenizer = sys.argv[1:]
    paint(Path(file), int(number), int(painters), name, Path(tokenizer))
