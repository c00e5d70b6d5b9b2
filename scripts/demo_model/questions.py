"""Questions about drawn pictures and their answers, by task.

A task gets pictures and makes one question about them, or none where it does not apply.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from demo_model import pictures
from demo_model.pictures import PLACES, SHAPES, Scene, place_of

Turn = tuple[str, str]


def _colour(rng: random.Random, scene: Scene) -> Turn:
    question = rng.choice(["What colour is it?", "What colour is the shape?"])
    return question, f"It is {scene.things[0].colour}."


def _shape(rng: random.Random, scene: Scene) -> Turn:
    return rng.choice(["What shape is it?", "Which shape is this?"]), f"It is a {scene.things[0].kind}."


def _where(rng: random.Random, scene: Scene) -> Turn:
    return rng.choice(["Where is it?", "Where is the shape?"]), f"It is at the {PLACES[place_of(scene.things[0])]}."


def _one(scene: Scene) -> str:
    return f"A {scene.things[0].colour} {scene.things[0].kind}."


def _describe(rng: random.Random, scene: Scene) -> Turn:
    question = rng.choice(["What is in the picture?", "What do you see?"])
    answer = {
        "one shape": _one,
        "several shapes": lambda scene: f"There are {len(scene.things)} shapes.",
        "number": lambda scene: f"The number {scene.text}.",
        "word": lambda scene: f"The word {scene.text}.",
        "bars": lambda scene: f"There are {len(scene.things)} bars.",
    }[scene.style](scene)
    return question, answer


def _count(rng: random.Random, scene: Scene) -> Turn:
    return "How many shapes are there?", f"There are {len(scene.things)} shapes."


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def _count_kind(rng: random.Random, scene: Scene) -> Turn:
    present = [thing.kind for thing in scene.things]
    shape = rng.choice(present if rng.random() < 0.8 else SHAPES)
    return f"How many {_plural(shape)} are there?", f"There are {present.count(shape)}."


def _colour_of(rng: random.Random, scene: Scene) -> Turn | None:
    kinds = [thing.kind for thing in scene.things]
    alone = [thing for thing in scene.things if kinds.count(thing.kind) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    return f"What colour is the {thing.kind}?", f"The {thing.kind} is {thing.colour}."


def _shape_of(rng: random.Random, scene: Scene) -> Turn | None:
    colours = [thing.colour for thing in scene.things]
    alone = [thing for thing in scene.things if colours.count(thing.colour) == 1]
    if not alone:
        return None
    thing = rng.choice(alone)
    return f"Which shape is {thing.colour}?", f"The {thing.kind} is {thing.colour}."


def _number(rng: random.Random, scene: Scene) -> Turn:
    return rng.choice(["What number is this?", "Which number do you see?"]), f"It is {scene.text}."


def _word(rng: random.Random, scene: Scene) -> Turn:
    return rng.choice(["What word is this?", "Which word do you see?"]), f"It is {scene.text}."


def _spelling(rng: random.Random, scene: Scene) -> Turn:
    return "How do you spell it?", "-".join(scene.text)


def _tallest(rng: random.Random, scene: Scene) -> Turn:
    return "Which bar is the tallest?", f"The {min(scene.things, key=lambda bar: bar.box[1]).colour} bar."


def _smallest(rng: random.Random, scene: Scene) -> Turn:
    return "Which bar is the smallest?", f"The {max(scene.things, key=lambda bar: bar.box[1]).colour} bar."


def _which_one(rng: random.Random, first: Scene, second: Scene) -> Turn:
    which = rng.choice(["first", "second"])
    return f"What is in the {which} picture?", _one(first if which == "first" else second)


def _same_colour(rng: random.Random, first: Scene, second: Scene) -> Turn:
    one, other = first.things[0].colour, second.things[0].colour
    answer = f"Yes, both are {one}." if one == other else f"No, {one} and {other}."
    return "Do they have the same colour?", answer


def _same_shape(rng: random.Random, first: Scene, second: Scene) -> Turn:
    one, other = first.things[0].kind, second.things[0].kind
    answer = f"Yes, two {_plural(one)}." if one == other else f"No, a {one} and a {other}."
    return "Do they have the same shape?", answer


def _more(rng: random.Random, first: Scene, second: Scene) -> Turn:
    which = "first" if len(first.things) > len(second.things) else "second"
    return "Which picture has more shapes?", f"The {which} picture."


def _count_in(rng: random.Random, first: Scene, second: Scene) -> Turn | None:
    which = rng.choice(["first", "second"])
    count = len((first if which == "first" else second).things)
    return None if count == 1 else (f"How many shapes are in the {which} picture?", f"There are {count} shapes.")


def alike(rng: random.Random) -> tuple[Scene, Scene]:
    """Two lone shapes: of two, colours are the same, and so are shapes."""
    first = pictures.one_shape(rng)
    thing = first.things[0]
    kind = thing.kind if rng.random() < 0.5 else None
    colour = thing.colour if rng.random() < 0.5 else None
    return first, pictures.one_shape(rng, kind, colour)


def more(rng: random.Random) -> tuple[Scene, Scene]:
    """Two pictures of shapes, not as many in each."""
    while True:
        draws = rng.choices([pictures.one_shape, pictures.several_shapes], [1, 6], k=2)
        first, second = (draw(rng) for draw in draws)
        if len(first.things) != len(second.things):
            return first, second


@dataclass(frozen=True)
class Task:
    """Which pictures it is asked about, how its question is made, and the pictures of the evaluation."""

    draw: Callable[[random.Random], tuple[Scene, ...]]
    ask: Callable[..., Turn | None]
    draw_held_out: Callable[[random.Random], tuple[Scene, ...]] | None = None


def _of(draw: Callable[[random.Random], Scene]) -> Callable[[random.Random], tuple[Scene, ...]]:
    return lambda rng: (draw(rng),)


ONE, SEVERAL, BARS = _of(pictures.one_shape), _of(pictures.several_shapes), _of(pictures.bars)
NUMBER, WORD, LETTERS = _of(pictures.number), _of(pictures.word), _of(pictures.letters)

TASKS: dict[str, Task] = {
    "colour": Task(ONE, _colour),
    "shape": Task(ONE, _shape),
    "where": Task(ONE, _where),
    "description": Task(ONE, _describe),
    "count": Task(SEVERAL, _count),
    "count of a shape": Task(SEVERAL, _count_kind),
    "colour of a shape": Task(SEVERAL, _colour_of),
    "shape of a colour": Task(SEVERAL, _shape_of),
    "number": Task(NUMBER, _number, lambda rng: (pictures.number(rng, pictures.HELD_OUT_NUMBERS),)),
    "tallest bar": Task(BARS, _tallest),
    "smallest bar": Task(BARS, _smallest),
    "word": Task(WORD, _word, _of(pictures.held_out_word)),
    "spelling of unknown words": Task(LETTERS, _spelling, _of(functools.partial(pictures.letters, unknown=True))),
    "two pictures: which": Task(alike, _which_one),
    "two pictures: same colour": Task(alike, _same_colour),
    "two pictures: same shape": Task(alike, _same_shape),
    "two pictures: count": Task(more, _count_in),
    "two pictures: more": Task(more, _more),
}

MORE_QUESTIONS: dict[Callable[..., tuple[Scene, ...]], tuple[Callable[..., Turn | None], ...]] = {
    SEVERAL: (_describe,),
    NUMBER: (_describe, _colour),
    BARS: (_describe,),
    WORD: (_describe, _colour, _spelling),
    LETTERS: (_colour,),
}
"""Those of other tasks, that suit these pictures as well."""

# How often rows of each kind of lone picture are drawn.
LONE_DRAWS: dict[Callable[[random.Random], tuple[Scene, ...]], float] = {
    ONE: 10,
    SEVERAL: 40,
    NUMBER: 10,
    BARS: 8,
    WORD: 12,
    LETTERS: 20,
}


def turns_about(rng: random.Random, draw: Callable, scenes: tuple[Scene, ...], count: int) -> list[Turn]:
    """Questions about the same pictures, tasks in turn, all different where there are enough."""
    asks = [task.ask for task in TASKS.values() if task.draw is draw]
    asks += MORE_QUESTIONS.get(draw, ())
    rng.shuffle(asks)
    found: list[Turn] = []
    for attempt in range(4 * count):
        turn = asks[attempt % len(asks)](rng, *scenes)
        if turn and turn not in found:
            found.append(turn)
        if len(found) == count:
            break
    return found
