"""Rows of prompts and questions about drawn pictures, as numbers. Knows no JAX: processes that draw start quickly.

Several questions about the same pictures share the row: each sees the pictures and itself.
Letters: B rows or pictures, T tokens, E cells.
"""

import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from demo_model import pictures
from demo_model.pictures import Scene
from demo_model.questions import LONE_DRAWS, Turn, alike, more, turns_about
from demo_model.tokenizer import END_OF_IMAGE, SOFT_TOKEN, START_OF_IMAGE

SOFT_TOKENS = 36
ROW = 160
MAX_TURNS = 5
PICTURE = f"\n\n{START_OF_IMAGE}{SOFT_TOKEN * SOFT_TOKENS}{END_OF_IMAGE}\n\n"


class Look(NamedTuple):
    """A batch of pictures and their labels."""

    pixels: np.ndarray  # uint8 [B, 96, 96, 3]
    kinds: np.ndarray  # int32 [B, E]
    colours: np.ndarray  # int32 [B, E]
    whole: np.ndarray  # int32 [B, 18]; -1 does not apply


def labelled(scenes: list[Scene]) -> Look:
    cells = [pictures.cell_labels(scene) for scene in scenes]
    return Look(
        np.stack([scene.pixels for scene in scenes]),
        np.stack([kinds for kinds, _ in cells]),
        np.stack([colours for _, colours in cells]),
        np.stack([pictures.whole_labels(scene) for scene in scenes]),
    )


class Rows(NamedTuple):
    """int32 and float32 [B, T], except `look`. Pictures are numbered through the batch.

    `branches` is 0 for the pictures and the text before them, else the number of the question, -1 for padding;
    `spans` is 1 + the number of the picture that a token is of, `cells` its place in that picture.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    spans: np.ndarray
    cells: np.ndarray
    look: Look


def prompt(question: str, num_pictures: int) -> str:
    """As the chat template writes it, and the processor after it."""
    return f"<bos><start_of_turn>user\n{PICTURE * num_pictures}{question}<end_of_turn>\n<start_of_turn>model\n"


Encode = Callable[[str], list[int]]


def encoder(tokenizer: Tokenizer) -> Encode:
    """Token ids of a text; those of texts that come again are kept."""
    return functools.lru_cache(1 << 15)(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


def pack(encode: Encode, asked: list[tuple[tuple[Scene, ...], list[Turn]]], length: int = ROW) -> Rows:
    """One row for each tuple of pictures, with as many of its questions as have room."""
    shape = (len(asked), length)
    tokens, targets, positions, spans, cells = (np.zeros(shape, np.int32) for _ in range(5))
    branches, weights = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    (soft,) = encode(SOFT_TOKEN)
    scenes: list[Scene] = []
    for row, (shown, turns) in enumerate(asked):
        at = common = 0
        for branch, (question, answer) in enumerate(turns, 1):
            ids = encode(prompt(question, len(shown)))
            head = len(ids) - ids[::-1].index(soft)
            said = encode(f"{answer}<end_of_turn>")
            whole = [*ids, *said]
            start = 0 if branch == 1 else head
            stop = at + len(whole) - 1 - start
            if stop > length:
                break
            place = slice(at, stop)
            tokens[row, place] = whole[start:-1]
            targets[row, place] = whole[start + 1 :]
            positions[row, place] = np.arange(start, len(whole) - 1)
            branches[row, place] = branch
            weights[row, stop - len(said) : stop] = 1.0
            if branch == 1:
                branches[row, :head] = 0
                common = head
            at = stop
        in_pictures = np.flatnonzero(tokens[row, :common] == soft)
        spans[row, in_pictures] = 1 + len(scenes) + np.arange(len(in_pictures)) // SOFT_TOKENS
        cells[row, in_pictures] = np.arange(len(in_pictures)) % SOFT_TOKENS
        scenes += shown
    return Rows(tokens, targets, weights, positions, branches, spans, cells, labelled(scenes))


def draw_rows(rng: random.Random, encode: Encode, count: int) -> Rows:
    """Rows of training. Of eight, three have two pictures, so that the number of pictures is always the same."""
    asked = []
    for row in range(count):
        lone = rng.choices(list(LONE_DRAWS), list(LONE_DRAWS.values()))[0]
        draw = {3: alike, 5: alike, 7: more}.get(row % 8, lone)
        scenes = draw(rng)
        asked.append((scenes, turns_about(rng, draw, scenes, MAX_TURNS)))
    return pack(encode, asked)
