"""Drawn pictures for the demo model's eyes: scenes of shapes, numbers, words and bars, and what is where in them.

A scene knows the class and colour of what covers each cell of the encoder's output, which is what its tower learns
first. The questions about scenes are in `questions.py`.
"""

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo_model.tasks import held_out
from demo_model.words import invented_word

SIDE = 96
CELLS = 6  # of the encoder's output, on a side
CANVAS = 192  # what is drawn, before it is resized as any picture is

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "blue": (40, 70, 220),
    "green": (30, 150, 60),
    "yellow": (240, 210, 30),
    "black": (25, 25, 25),
    "purple": (140, 50, 170),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
WORDS = (
    "fox bear owl cat dog frog duck wolf lion goat hen crow swan deer bee plum "
    "pear milk door city rain snow wind sun moon star boat drum lamp ring rope shoe "
    "vase house horse table bread water cloud train"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST_LETTERS = 5
KINDS = ("", *SHAPES, "bar", *"0123456789", *LETTERS)
"""What can cover a cell; the first is nothing."""
COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Thing:
    """Something drawn: what, in which colour, and its box in pixels of the canvas (left, top, right, bottom)."""

    kind: str
    colour: str
    box: tuple[float, float, float, float]

    @property
    def centre(self) -> tuple[float, float]:
        left, top, right, bottom = self.box
        return (left + right) / 2 / CANVAS, (top + bottom) / 2 / CANVAS


@dataclass(frozen=True)
class Scene:
    """A picture and what is in it. `text` is the number or word that is written there."""

    style: str
    pixels: np.ndarray  # uint8 [96, 96, 3]
    things: list[Thing]
    text: str = ""
    places: list[int] = field(default_factory=list)  # of a grid of 3 x 3, for each thing of a scene of several shapes


def _shade(rng: random.Random, colour: str) -> tuple[int, ...]:
    return tuple(min(255, max(0, part + rng.randint(-18, 18))) for part in COLOURS[colour])


def _blank(rng: random.Random) -> Image.Image:
    light = rng.randint(232, 255)
    return Image.new("RGB", (CANVAS, CANVAS), tuple(min(255, light + rng.randint(-4, 4)) for _ in range(3)))


def _corners(x: float, y: float, radius: float, turns: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points by (angle in turns from the top, share of the radius)."""
    return [
        (x + radius * share * math.sin(2 * math.pi * turn), y - radius * share * math.cos(2 * math.pi * turn))
        for turn, share in turns
    ]


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, size: float, fill: tuple) -> None:
    r = size / 2
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill)
    elif shape == "square":
        draw.rectangle((x - 0.88 * r, y - 0.88 * r, x + 0.88 * r, y + 0.88 * r), fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + 0.9 * r), (x - r, y + 0.9 * r)], fill)
    elif shape == "star":
        draw.polygon(_corners(x, y, 1.1 * r, [(i / 10, 0.42 if i % 2 else 1) for i in range(10)]), fill)
    else:
        w = 0.3 * r
        draw.rectangle((x - r, y - w, x + r, y + w), fill)
        draw.rectangle((x - w, y - r, x + w, y + r), fill)


def _finish(image: Image.Image) -> np.ndarray:
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _thing(kind: str, colour: str, x: float, y: float, size: float) -> Thing:
    return Thing(kind, colour, (x - size / 2, y - size / 2, x + size / 2, y + size / 2))


def one_shape(rng: random.Random, shape: str | None = None, colour: str | None = None) -> Scene:
    image = _blank(rng)
    shape, colour = shape or rng.choice(SHAPES), colour or rng.choice(COLOUR_NAMES)
    size = rng.uniform(44, 120)
    x, y = (rng.uniform(size / 2 + 4, CANVAS - size / 2 - 4) for _ in range(2))
    _draw_shape(ImageDraw.Draw(image), shape, x, y, size, _shade(rng, colour))
    return Scene("one shape", _finish(image), [_thing(shape, colour, x, y, size)])


def several_shapes(rng: random.Random) -> Scene:
    """Two to seven shapes in a grid of 3 x 3. Few kinds at a time, so that kinds come more than once."""
    image = _blank(rng)
    draw, third = ImageDraw.Draw(image), CANVAS / 3
    places = sorted(rng.sample(range(9), rng.randint(2, 7)))
    shapes = rng.sample(SHAPES, rng.randint(1, 4))
    colours = rng.sample(COLOUR_NAMES, rng.randint(1, 5))
    things = []
    for place in places:
        shape, colour, size = rng.choice(shapes), rng.choice(colours), rng.uniform(36, 62)
        x, y = (third * (part + 0.5) + rng.uniform(-4, 4) for part in (place % 3, place // 3))
        _draw_shape(draw, shape, x, y, size, _shade(rng, colour))
        things.append(_thing(shape, colour, x, y, size))
    return Scene("several shapes", _finish(image), things, places=places)


INKS = ("black", "black", "red", "blue", "green", "purple")
"""Of what is written."""


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _written(rng: random.Random, style: str, text: str, sizes: tuple[int, int], colour: str = "") -> Scene:
    image, colour = _blank(rng), colour or rng.choice(INKS)
    draw, font = ImageDraw.Draw(image), _font(rng.randint(*sizes))
    left, top, right, bottom = draw.textbbox((0, 0), text, font)
    x = rng.uniform(6, max(7, CANVAS - 6 - right + left)) - left
    y = rng.uniform(10, max(11, CANVAS - 10 - bottom + top)) - top
    draw.text((x, y), text, _shade(rng, colour), font)
    ends = [x + draw.textlength(text[:i], font) for i in range(len(text) + 1)]
    return Scene(
        style,
        _finish(image),
        [Thing(text[i], colour, (ends[i], y + top, ends[i + 1], y + bottom)) for i in range(len(text))],
        text,
    )


HELD_OUT_NUMBERS = [value for value in range(10, 100) if held_out(f"picture of {value}")]
TRAINED_NUMBERS = sorted(set(range(100)) - set(HELD_OUT_NUMBERS))


def number(rng: random.Random, numbers: Sequence[int] = TRAINED_NUMBERS) -> Scene:
    return _written(rng, "number", str(rng.choice(numbers)), (76, 108))


HELD_OUT_WORDS = [(word, ink) for word in WORDS for ink in sorted(set(INKS)) if held_out(f"{word} in {ink}")]
"""Words, and the ink in which each is never trained."""


def _sizes(text: str) -> tuple[int, int]:
    """In which the word has room."""
    return 48, min(88, 280 // len(text))


def word(rng: random.Random) -> Scene:
    while True:
        drawn = rng.choice(WORDS), rng.choice(INKS)
        if drawn not in HELD_OUT_WORDS:
            return _written(rng, "word", drawn[0], _sizes(drawn[0]), drawn[1])


def held_out_word(rng: random.Random) -> Scene:
    text, ink = rng.choice(HELD_OUT_WORDS)
    return _written(rng, "word", text, _sizes(text), ink)


def letters(rng: random.Random, unknown: bool = False) -> Scene:
    """Three to five letters as a syllable or two would have them; each tenth such word is never trained.

    Of those that are trained some are any letters at all.
    """
    while True:
        any_at_all = not unknown and rng.random() < 0.3
        text = "".join(rng.choices(LETTERS, k=rng.randint(3, 5))) if any_at_all else invented_word(rng, 1, 2)
        if 3 <= len(text) <= MOST_LETTERS and held_out(f"picture of {text}") == unknown and text not in WORDS:
            return _written(rng, "letters", text, _sizes(text))


def bars(rng: random.Random) -> Scene:
    """Three to five bars of different colours, the tallest and the smallest by a twelfth of the picture or more."""
    image, count = _blank(rng), rng.randint(3, 5)
    draw, step = ImageDraw.Draw(image), CANVAS / count
    middle = [rng.uniform(44, 136) for _ in range(count - 2)]
    heights = [*middle, max(middle) + rng.uniform(16, 32), max(10, min(middle) - rng.uniform(16, 80))]
    rng.shuffle(heights)
    things, floor = [], CANVAS - rng.uniform(4, 14)
    for at, (colour, height) in enumerate(zip(rng.sample(COLOUR_NAMES, count), heights, strict=True)):
        left, right = step * at + 0.15 * step, step * at + 0.85 * step
        top = floor - height
        draw.rectangle((left, top, right, floor), _shade(rng, colour))
        things.append(Thing("bar", colour, (left, top, right, floor)))
    return Scene("bars", _finish(image), things)


def cell_labels(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Kind and colour of what covers each cell, int32 [36] each; 0 is nothing."""
    kinds, colours = (np.zeros((CELLS, CELLS), np.int32) for _ in range(2))
    width = CANVAS / CELLS
    for thing in scene.things:
        left, top, right, bottom = thing.box

        def inside(low: float, high: float) -> slice:
            first, last = math.ceil(low / width - 0.5), math.floor(high / width - 0.5)
            if first > last:  # smaller than a cell: the one that has its centre
                first = last = int((low + high) / 2 / width)
            return slice(max(0, first), min(CELLS - 1, last) + 1)

        at = inside(top, bottom), inside(left, right)
        kinds[at] = KINDS.index(thing.kind)
        colours[at] = 1 + COLOUR_NAMES.index(thing.colour)
    return kinds.ravel(), colours.ravel()


def whole_labels(scene: Scene) -> np.ndarray:
    """What a look at the whole gives, int32 [18]; -1 where it does not apply.

    Number of shapes, of shapes of each kind, colour of the tallest and of the smallest bar, the word, digits from the
    last, the place of a lone shape, and letters from the first.
    """
    found = np.full(len(WHOLE_SIZES), -1, np.int32)
    kinds = [thing.kind for thing in scene.things]
    if scene.style in ("one shape", "several shapes"):
        found[0] = len(kinds)
        found[1:6] = [kinds.count(shape) for shape in SHAPES]
    if scene.style == "one shape":
        found[12] = place_of(scene.things[0])
    if scene.style == "bars":
        by_height = sorted(scene.things, key=lambda thing: thing.box[1])
        found[6], found[7] = (COLOUR_NAMES.index(by_height[i].colour) for i in (0, -1))
    if scene.style == "word":
        found[8] = WORDS.index(scene.text)
    if scene.style == "number":
        found[9:12] = [int(digit) for digit in scene.text[::-1]] + [10] * (3 - len(scene.text))
    if scene.style in ("word", "letters"):
        known = [LETTERS.index(letter) for letter in scene.text]
        found[13:] = known + [len(LETTERS)] * (MOST_LETTERS - len(known))
    return found


WHOLE_SIZES = (10, *[8] * 5, 6, 6, len(WORDS), 11, 11, 11, 4, *[len(LETTERS) + 1] * MOST_LETTERS)
"""Number of classes of each of `whole_labels`."""

PLACES = ("top left", "top right", "bottom left", "bottom right")


def place_of(thing: Thing) -> int:
    """The quarter of the picture that has its centre, as an index of `PLACES`."""
    x, y = thing.centre
    return (x > 0.5) + 2 * (y > 0.5)
