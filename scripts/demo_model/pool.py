"""Painters at work, and a pool of what they drew on the device.

A new chunk takes the place of the oldest, and every step takes a few chunks at random. So the device never waits: where
it is quicker than the painters, it sees a row more than once, in other company.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from demo_model.corpus import stream
from demo_model.painting import CHUNK_ROWS, PAUSE, SLOTS, leaves_of, rows_of, slots_of
from demo_model.rows import Rows, draw_rows, encoder


class Painters:
    """Processes that draw. They end with the trainer, or when `stop` is called."""

    def __init__(self, count: int, tokenizer: Tokenizer, name: str):
        self.example = draw_rows(stream(0, "example"), encoder(tokenizer), CHUNK_ROWS)
        self._folder = tempfile.TemporaryDirectory(prefix="jaxpaged-pictures-")
        file, words = Path(self._folder.name, "slots"), Path(self._folder.name, "tokenizer.json")
        words.write_text(tokenizer.to_str(), encoding="utf-8")
        size = 1 + sum(leaf.nbytes for leaf in leaves_of(self.example))
        with file.open("wb") as empty:
            empty.truncate(size * SLOTS * count)
        self._slots, self._next = slots_of(file, count, self.example), 0
        command = [sys.executable, "-m", "demo_model.painting", str(file)]
        self._processes = [
            subprocess.Popen([*command, str(i), str(count), name, str(words)], cwd=Path(__file__).parent.parent)
            for i in range(count)
        ]

    def take(self, wait: bool) -> Rows | None:
        """The next chunk; None where there is none yet, unless it is waited for."""
        while not (marked := np.flatnonzero(self._slots["marked"])).size:
            ended = [process.returncode for process in self._processes if process.poll() is not None]
            if ended:
                raise RuntimeError(f"painters ended with {ended}; what they say above is why")
            if not wait:
                return None
            time.sleep(PAUSE)
        slot = marked[np.argmax(marked >= self._next)]  # in turn
        self._next = slot + 1
        chunk = rows_of([np.array(self._slots[name][slot]) for name in self._slots.dtype.names[1:]])
        self._slots["marked"][slot] = 0
        return chunk

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        self._folder.cleanup()


class Pool:
    """The newest chunks, on the device: `rows` has an axis of chunks in front of each array."""

    def __init__(self, painters: Painters, size: int, seed: int):
        self._painters, self._size, self.drawn = painters, size, 0
        self._rng = np.random.default_rng(seed)
        self.rows = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), painters.example)
        place = lambda rows, chunk, at: jax.tree.map(lambda all_, one: all_.at[at].set(one), rows, chunk)
        self._place = jax.jit(place, donate_argnums=0)

    def fill(self, enough: int) -> None:
        """Takes what is there, at most four chunks, and waits until there are `enough` in all."""
        for _ in range(max(4, enough)):
            chunk = self._painters.take(wait=self.drawn < enough)
            if chunk is None:
                return
            self.rows = self._place(self.rows, chunk, np.int32(self.drawn % self._size))
            self.drawn += 1

    def pick(self, count: int) -> np.ndarray:
        """int32 [count]: numbers of different chunks, where there are so many."""
        there = min(self.drawn, self._size)
        return self._rng.choice(there, count, replace=there < count).astype(np.int32)
