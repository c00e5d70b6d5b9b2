"""Questions about drawn pictures and their answers, by task.

A task gets pictures and makes one question about them, or none where it does not apply.
"""

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
        "bars": lambda scene: f"There are {len(scene.things)} bars.",
    }[scene.style](scene)
    return question, answer


def _count(rng: random.Random, scene: Scene) -> Turn:
    return "How many shapes are there?", f"There are {len(scene.things)} shapes."


def _count_kind(rng: random.Random, scene: Scene) -> Turn:
    present = [thing.kind for thing in scene.things]
    shape = rng.choice(present if rng.random() < 0.8 else SHAPES)
    plural = f"{shape}es" if shape == "cross" else f"{shape}s"
    return f"How many {plural} are there?", f"There are {present.count(shape)}."


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


def _tallest(rng: random.Random, scene: Scene) -> Turn:
    return "Which bar is the tallest?", f"The {min(scene.things, key=lambda bar: bar.box[1]).colour} bar."


def _which_one(rng: random.Random, first: Scene, second: Scene) -> Turn:
    which = rng.choice(["first", "second"])
    return f"What is in the {which} picture?", _one(first if which == "first" else second)


def alike(rng: random.Random) -> tuple[Scene, Scene]:
    """Two lone shapes: of two, colours are the same, and so are shapes."""
    first = pictures.one_shape(rng)
    thing = first.things[0]
    kind = thing.kind if rng.random() < 0.5 else None
    colour = thing.colour if rng.random() < 0.5 else None
    return first, pictures.one_shape(rng, kind, colour)


@dataclass(frozen=True)
class Task:
    """Which pictures it is asked about, how its question is made, and the pictures of the evaluation."""

    draw: Callable[[random.Random], tuple[Scene, ...]]
    ask: Callable[..., Turn | None]
    draw_held_out: Callable[[random.Random], tuple[Scene, ...]] | None = None


def _of(draw: Callable[[random.Random], Scene]) -> Callable[[random.Random], tuple[Scene, ...]]:
    return lambda rng: (draw(rng),)


ONE, SEVERAL, BARS = _of(pictures.one_shape), _of(pictures.several_shapes), _of(pictures.bars)
NUMBER = _of(pictures.number)

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
    "two pictures: which": Task(alike, _which_one),
}

# How often rows of each kind of lone picture are drawn.
LONE_DRAWS: dict[Callable[[random.Random], tuple[Scene, ...]], float] = {
    ONE: 20,
    SEVERAL: 36,
    NUMBER: 28,
    BARS: 16,
}


def turns_about(rng: random.Random, draw: Callable, scenes: tuple[Scene, ...], count: int) -> list[Turn]:
    """Questions about the same pictures, tasks in turn, all different where there are enough."""
    asks = [task.ask for task in TASKS.values() if task.draw is draw]
    if draw in (NUMBER, BARS, SEVERAL):
        asks.append(_describe)
    rng.shuffle(asks)
    found: list[Turn] = []
    for attempt in range(4 * count):
        turn = asks[attempt % len(asks)](rng, *scenes)
        if turn and turn not in found:
            found.append(turn)
        if len(found) == count:
            break
    return found
