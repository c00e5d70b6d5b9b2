"""The mix of training samples, written as they look to the engine.

A sample is a list of pieces of text, each with the weight of its tokens in
the loss: answers count fully, what a user would write hardly at all.
"""

import random
import zlib
from collections.abc import Iterator

from demo_model import facts, tasks
from demo_model.small_talk import small_talk, unknown_question
from demo_model.stories import filler_sentence, story

Sample = list[tuple[str, float]]
Turn = tuple[str, str]

PROMPT_WEIGHT = 0.03
STORY_WEIGHT = 0.35

# Share of the short samples that are lists of bare sums or spellings.
DRILL_SHARE = 0.22

SYSTEM_MESSAGES = (
    "You are a helpful assistant.|You are the demo model of jaxpaged.|"
    "Answer the question.|Be brief.|You are a friendly assistant. Be brief."
).split("|")

# How often each kind of turn is drawn; training passes its own when a task
# needs more practice.
DEFAULT_MIX: dict[str, float] = {
    "capital": 16,
    "country of": 5,
    "addition": 14,
    "subtraction": 7,
    "multiplication": 5,
    "spelling": 15,
    "counting": 11,
    "small fact": 6,
    "repeat": 12,
    "json": 18,
    "code word": 8,
    "story": 4,
    "small talk": 7,
    "unknown": 9,
}

_STORY_REQUESTS = (
    "Tell me a story about {}.|Tell me a story about {}.|Write a story about {}.|"
    "Tell a story about {}.|Please tell me a story about {}.|"
    "Write a short story about {}.|Can you tell me a story about {}?"
).split("|")


def _story_turn(rng: random.Random) -> Turn:
    animal = rng.choice(facts.ANIMALS)
    if rng.random() < 0.2:
        request = rng.choice(["Tell me a story.", "Write a story.", "Tell a story"])
    else:
        article = rng.choice(["an" if animal[0] in "aeiou" else "a", "the"])
        request = rng.choice(_STORY_REQUESTS).format(f"{article} {animal}")
    return request, story(rng, animal)


def draw_turn(rng: random.Random, mix: dict[str, float], test: bool = False) -> Turn:
    """One question and its answer."""
    kind = rng.choices(list(mix), list(mix.values()))[0]
    if kind == "code word":
        return tasks.draw_code_word(rng, rng.choice([0, 60, 150, 300]), test)
    if kind == "story":
        return _story_turn(rng)
    if kind == "small talk":
        return small_talk(rng)
    if kind == "unknown":
        return unknown_question(rng)
    return tasks.draw(kind, rng, test)


def chat(turns: list[Turn], system: str = "") -> Sample:
    """Turns in the chat template's form; only answers carry full weight."""
    sample: Sample = []
    opening = "<bos>"
    for number, (question, answer) in enumerate(turns):
        if number == 0 and system:
            question = f"{system}\n\n{question}"
        sample.append((f"{opening}<start_of_turn>user\n", 0.0))
        sample.append((question, PROMPT_WEIGHT))
        sample.append(("<end_of_turn>\n<start_of_turn>model\n", 0.0))
        is_story = answer.count(".") > 3 and len(answer) > 250
        sample.append((answer, STORY_WEIGHT if is_story else 1.0))
        sample.append(("<end_of_turn>", 1.0))
        opening = "\n"
    return sample


def plain(rng: random.Random, mix: dict[str, float]) -> Sample:
    """Text without the chat template, for bare completions."""
    draw = rng.random()
    if draw < 0.35:
        opening = rng.choice(["Once upon a time"] * 3 + ["Long ago", "One day", None])
        text = story(rng, rng.choice(facts.ANIMALS), opening)
        return [("<bos>", 0.0), (text, STORY_WEIGHT), ("<eos>", 1.0)]
    if draw < 0.45:
        text = " ".join(filler_sentence(rng) for _ in range(rng.randint(2, 5)))
        return [("<bos>", 0.0), (text, STORY_WEIGHT / 2), ("<eos>", 1.0)]
    if draw < 0.6:
        _, _, answer = tasks.capital(rng)
        cut = answer.rindex(" is ") + 3
        return [("<bos>", 0.0), (answer[:cut], 0.1), (answer[cut:], 1.0), ("<eos>", 1.0)]
    if draw < 0.75:
        term, result = tasks.sum_drill(rng)[0]
        return [("<bos>", 0.0), (term, 0.0), (f"{result}.", 1.0), ("<eos>", 1.0)]
    question, answer = draw_turn(rng, mix)
    return [("<bos>", 0.0), (f"{question}\n", PROMPT_WEIGHT), (answer, 1.0), ("<eos>", 1.0)]


def _drill(rng: random.Random) -> Sample:
    sample: Sample = [("<bos>", 0.0)]
    if rng.random() < 0.35:
        for question, spelled in tasks.spelling_drill(rng):
            sample += [(question, 0.0), (spelled, 1.0), ("\n", 0.0)]
    else:
        for term, result in tasks.sum_drill(rng):
            sample += [(term, 0.0), (result, 1.0), (".", 1.0), ("\n", 0.0)]
    return [*sample, ("<eos>", 0.0)]


def short_sample(rng: random.Random, mix: dict[str, float]) -> Sample:
    draw = rng.random()
    if draw < 0.08:
        return plain(rng, mix)
    if draw < 0.08 + DRILL_SHARE:
        return _drill(rng)
    turns = [draw_turn(rng, mix)]
    while len(turns) < 4 and rng.random() < 0.45:
        if turns[-1][1].startswith("The capital of") and rng.random() < 0.4:
            turns.append(tasks.next_capital(rng)[1:])
        else:
            turns.append(draw_turn(rng, mix))
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.06 else ""
    return chat(turns, system)


def medium_sample(rng: random.Random, mix: dict[str, float], characters: int) -> Sample:
    """A code word further back than the sliding window, or a list to copy.

    The lists make every token of the answer practise looking that far back.
    """
    if rng.random() < 0.5:
        return long_sample(rng, mix, characters)
    _, question, answer = tasks.repeat(rng, rng.randint(10, 26))
    return chat([(question, answer)])


def long_sample(rng: random.Random, mix: dict[str, float], characters: int) -> Sample:
    """A code word far back, often with a second turn after it."""
    turn = tasks.draw_code_word(rng, characters, test=False)
    turns = [turn]
    if rng.random() < 0.3:
        noun = turn[1].split(" is ")[0].removeprefix("The ")
        question = rng.choice([f"What was the {noun}?", f"Tell me the {noun} again."])
        turns.append((question, turn[1]))
    elif rng.random() < 0.3:
        turns.append(draw_turn(rng, mix))
    return chat(turns)


def tokenizer_texts(seed: int, count: int) -> Iterator[str]:
    """Texts from which the tokenizer learns its merges."""
    rng = random.Random(seed)
    for _ in range(count):
        for text, _ in short_sample(rng, DEFAULT_MIX):
            if not text.startswith("<"):
                yield text
    for country, city in facts.CAPITALS * 8:
        yield f"What is the capital of {country}? The capital of {country} is {city}."


def stream(seed: int, name: str) -> random.Random:
    """An own random stream for each purpose, the same in every run."""
    return random.Random(zlib.crc32(f"{seed}/{name}".encode()))
