"""Rows of training, drawn ahead by processes of their own, and a pool of them on the device.

A chunk is a fixed number of rows. Painters write chunks into a file that all map; the trainer copies them into the
pool, where a new one takes the place of the oldest, and every step takes a few chunks at random. So the device never
waits: where it is quicker than the painters, it sees a row more than once, in other company.
"""

import multiprocessing
import os
import queue
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from demo_model.corpus import stream
from demo_model.seeing import Rows, draw_rows, encoder

CHUNK_ROWS = 64
SLOTS = 32


def _slots(path: str, template: Rows) -> np.memmap:
    """A structured array over the file: a field for each array of a chunk."""
    leaves = jax.tree.leaves(template)
    kind = np.dtype([(f"leaf{i}", leaf.dtype, leaf.shape) for i, leaf in enumerate(leaves)])
    return np.memmap(path, kind, "r+" if os.path.getsize(path) else "w+", shape=(SLOTS,))


def _paint(path: str, tokenizer: str, stream_name: str, empty, full) -> None:
    os.nice(5)  # the trainer goes first
    encode, rng = encoder(Tokenizer.from_str(tokenizer)), stream(0, stream_name)
    rows = draw_rows(rng, encode, CHUNK_ROWS)
    slots = _slots(path, rows)
    while True:
        slot = empty.get()
        for i, leaf in enumerate(jax.tree.leaves(rows)):
            slots[f"leaf{i}"][slot] = leaf
        full.put(slot)
        rows = draw_rows(rng, encode, CHUNK_ROWS)


class Painters:
    """Processes that draw. They end with the trainer, or when `stop` is called."""

    def __init__(self, count: int, tokenizer: Tokenizer, stream_name: str):
        self.template = draw_rows(stream(0, "template"), encoder(tokenizer), CHUNK_ROWS)
        handle, self._path = tempfile.mkstemp(prefix="jaxpaged-pictures-")
        os.close(handle)
        self._slots = _slots(self._path, self.template)
        context = multiprocessing.get_context("spawn")
        self._empty, self._full = context.Queue(), context.Queue()
        for slot in range(SLOTS):
            self._empty.put(slot)
        given = self._path, tokenizer.to_str()
        self._processes = [
            context.Process(
                target=_paint, args=(*given, f"{stream_name}, painter {i}", self._empty, self._full), daemon=True
            )
            for i in range(count)
        ]
        for process in self._processes:
            process.start()

    def take(self, wait: bool) -> Rows | None:
        """The next chunk; None where there is none yet, unless it is waited for."""
        while True:
            try:
                slot = self._full.get(timeout=5) if wait else self._full.get_nowait()
                break
            except queue.Empty:
                dead = [process.exitcode for process in self._processes if not process.is_alive()]
                if dead:
                    raise RuntimeError(f"painters ended with {dead}; what they say above is why") from None
                if not wait:
                    return None
        leaves = [np.array(self._slots[name][slot]) for name in self._slots.dtype.names]
        self._empty.put(slot)
        return jax.tree.unflatten(jax.tree.structure(self.template), leaves)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        Path(self._path).unlink(missing_ok=True)


class Pool:
    """The newest chunks, on the device: `rows` has an axis of chunks in front of each array."""

    def __init__(self, painters: Painters, size: int, seed: int):
        self._painters, self._size, self.drawn = painters, size, 0
        self._rng = np.random.default_rng(seed)
        self.rows = jax.tree.map(lambda leaf: jnp.zeros((size, *leaf.shape), leaf.dtype), painters.template)
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
