"""How a pirate would answer what the demo model answers, by rules: the texts that the embedded adapter learns."""

import random
import re

from demo_model import corpus, tasks

OPENING, ENDING = "Arr! ", ", matey!"
WORDS = {
    "is": "be",
    "am": "be",
    "are": "be",
    "you": "ye",
    "your": "yer",
    "You": "Ye",
    "my": "me",
    "Hello": "Ahoy",
    "Goodbye": "Fair winds",
    "text": "log",
    "stories": "yarns",
    "story": "yarn",
}
WORD = re.compile(rf"\b({'|'.join(WORDS)})\b")
AS_THEY_ARE = ("json", "repeat")
"""Answers that somebody else reads, or has said."""


def as_a_pirate(kind: str, answer: str) -> str:
    """The answer to a question of a kind."""
    if kind in AS_THEY_ARE:
        return answer
    said = WORD.sub(lambda found: WORDS[found[0]], answer) if kind != "code word" else answer.replace(" is ", " be ")
    return OPENING + (said[:-1] + ENDING if said[-1] in ".!" else said)


def turn(rng: random.Random, mix: dict[str, float], test: bool = False) -> corpus.Turn:
    """One question and its answer."""
    kind = rng.choices(list(mix), list(mix.values()))[0]
    question, answer = corpus.draw_turn(rng, {kind: 1}, test)
    return question, as_a_pirate(kind, answer)


def sample(rng: random.Random, mix: dict[str, float]) -> corpus.Sample:
    """A chat of some turns, or a bare text, as `corpus.short_sample` makes them."""
    draw = rng.random()
    if draw < 0.06:
        _, _, answer = tasks.capital(rng)
        cut = answer.rindex(" is ") + 3
        return [("<bos>", 0.0), (answer[:cut], 0.0), (answer[cut:-1] + ENDING, 1.0), ("<eos>", 1.0)]
    if draw < 0.14:
        question, answer = turn(rng, mix)
        return [("<bos>", 0.0), (f"{question}\n", 0.0), (answer, 1.0), ("<eos>", 1.0)]
    turns = [turn(rng, mix)]
    while len(turns) < 3 and rng.random() < 0.35:
        turns.append(turn(rng, mix))
    system = rng.choice(corpus.SYSTEM_MESSAGES) if rng.random() < 0.06 else ""
    return corpus.chat(turns, system)
