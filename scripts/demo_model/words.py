"""Random words: real ones, invented ones, and code words."""

import random

from demo_model import facts


def invented_word(rng: random.Random, low: int = 2, high: int = 3) -> str:
    parts = range(rng.randint(low, high))
    sound = rng.choice
    return "".join(sound(facts.ONSETS) + sound(facts.VOWELS) + sound(facts.CODAS) for _ in parts)


def any_word(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.62:
        return rng.choice(facts.WORDS + facts.ANIMALS + facts.COLOURS)
    if draw < 0.72:
        return rng.choice(facts.NAMES)
    if draw < 0.82:
        return rng.choice(facts.CAPITALS)[1].split()[0]
    return invented_word(rng, 1, 3)


def code_word(rng: random.Random) -> str:
    """Something that cannot be memorised: sounds, letters and digits."""
    draw, digits = rng.random(), str(rng.randint(0, 9999))
    if draw < 0.45:
        return invented_word(rng) + str(rng.randint(10, 99))
    if draw < 0.6:
        return invented_word(rng)
    if draw < 0.7:
        return rng.choice(facts.WORDS) + rng.choice(["", "-", " "]) + digits
    if draw < 0.85:
        pair = rng.choice(facts.COLOURS), rng.choice(facts.ANIMALS)
        text = "-".join(pair) + rng.choice(["", "", "-" + digits])
        return text.upper() if rng.random() < 0.5 else text
    if draw < 0.95:
        letters = rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 4))
        return "".join(letters) + rng.choice(["", "-"]) + digits
    return digits
