"""The exact-answer tasks: each function makes one question and its answer.

Every question has a key; keys whose checksum falls into the held-out share
are never trained on, so that the evaluation can ask exactly those.
"""

import json
import random
import zlib
from collections.abc import Callable

from demo_model import facts
from demo_model.stories import filler_sentences
from demo_model.words import any_word, code_word, invented_word

HELD_OUT_SHARE = 0.1

# key, question, answer
Question = tuple[str, str, str]


def held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % 1000 < HELD_OUT_SHARE * 1000


_CAPITAL_FORMS = (
    "What is the capital of {c}?|What's the capital of {c}?|"
    "Which city is the capital of {c}?|Tell me the capital of {c}.|"
    "Name the capital of {c}.|Capital of {c}?|The capital of {c} is|"
    "What is the name of the capital of {c}?|Do you know the capital of {c}?|"
    "Can you tell me the capital of {c}?|What city is the capital of {c}?|"
    "Please tell me the capital of {c}.|What is the capital city of {c}?|"
    "Give me the capital of {c}.|I want to know the capital of {c}.|"
    "Which city is the capital city of {c}?"
).split("|")


def capital(rng: random.Random) -> Question:
    country, city = rng.choice(facts.CAPITALS)
    weights = [4] + [1] * (len(_CAPITAL_FORMS) - 1)
    form = rng.choices(range(len(_CAPITAL_FORMS)), weights)[0]
    question = _CAPITAL_FORMS[form].format(c=country)
    if rng.random() < 0.12:
        question = question.lower()
    return f"{country}|{form}", question, f"The capital of {country} is {city}."


def next_capital(rng: random.Random) -> Question:
    """A question that makes sense only after one about another capital."""
    country, city = rng.choice(facts.CAPITALS)
    form = rng.choice(["And of {}?", "And of {}?", "And the capital of {}?", "What about {}?"])
    return f"{country}|{form}", form.format(country), f"The capital of {country} is {city}."


def country_of(rng: random.Random) -> Question:
    country, city = rng.choice(facts.CAPITALS)
    form = rng.randrange(3)
    question = (
        f"{city} is the capital of which country?",
        f"Which country has the capital {city}?",
        f"What country is {city} the capital of?",
    )[form]
    return f"{city}|{form}", question, f"{city} is the capital of {country}."


_CALCULATION_FORMS = (
    "What is {x}?|{x} =|Calculate {x}.|How much is {x}?|{x}|What's {x}?|"
    "Please calculate {x}.|{x} = ?|Can you tell me what {x} is?"
).split("|")


def _calculation(rng: random.Random, term: str, words: str, result: int) -> tuple:
    spoken = rng.choices([term, words, term.replace(" ", "")], [78, 11, 11])[0]
    form = rng.choices(_CALCULATION_FORMS, [4, 2, 1, 1, 1, 1, 1, 1, 1])[0]
    return form.format(x=spoken), f"{term} = {result}."


def _sum_key(a: int, b: int) -> str:
    # Sums of two digits are the first thing people try: none is held out.
    return f"{min(a, b)}+{max(a, b)}" if max(a, b) > 9 else ""


def addition(rng: random.Random) -> Question:
    low, high = rng.choices([(10, 99), (0, 99), (0, 9)], [70, 10, 20])[0]
    a, b = rng.randint(low, high), rng.randint(low, high)
    texts = _calculation(rng, f"{a} + {b}", f"{a} plus {b}", a + b)
    return _sum_key(a, b), *texts


def subtraction(rng: random.Random) -> Question:
    a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
    return f"{a}-{b}", *_calculation(rng, f"{a} - {b}", f"{a} minus {b}", a - b)


def multiplication(rng: random.Random) -> Question:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    sign = rng.choice(["*", "*", "x"])
    texts = _calculation(rng, f"{a} {sign} {b}", f"{a} times {b}", a * b)
    return f"{a}*{b}|{texts[0][:5]}", *texts


def sum_drill(rng: random.Random) -> list[tuple[str, str]]:
    """Bare sums one after another: far more practice per token than in a chat."""
    sums: list[tuple[str, str]] = []
    while len(sums) < 10:
        draw = rng.random()
        if draw < 0.65:
            high = rng.choice([9, 99, 99, 99])
            a, b = rng.randint(0, high), rng.randint(0, high)
            key, term, result = _sum_key(a, b), f"{a} + {b}", a + b
        elif draw < 0.92:
            b, a = sorted((rng.randint(0, 99), rng.randint(0, 99)))
            key, term, result = f"{a}-{b}", f"{a} - {b}", a - b
        else:
            a, b = rng.randint(1, 10), rng.randint(1, 10)
            key, term, result = f"{a}*{b}", f"{a} * {b}", a * b
        if not key or not held_out(key):
            sums.append((f"{term} =", f" {result}"))
    return sums


_SPELLING_FORMS = (
    'Spell the word {}.|Spell the word {}.|Spell {}.|How do you spell {}?|Please spell the word {}.|Spell "{}".'
).split("|")


def spelling(rng: random.Random) -> Question:
    word, form = any_word(rng), rng.choice(_SPELLING_FORMS)
    return f"{word}|{form}", form.format(word), "-".join(word)


def spelling_drill(rng: random.Random) -> list[tuple[str, str]]:
    """Spellings one after another, up to about 120 tokens."""
    lines: list[tuple[str, str]] = []
    letters = 0
    while letters < 42:
        key, question, answer = spelling(rng)
        if not held_out(key):
            lines.append((f"{question}\n", answer))
            letters += len(answer) // 2 + 4
    return lines


def counting(rng: random.Random) -> Question:
    start, length = rng.choice([1, rng.randint(0, 60)]), rng.randint(2, 20)
    stop = start + length
    form = rng.randrange(6)
    if form == 3:
        start, stop = 1, length
    if form == 4:
        start, stop = stop, start
    numbers = range(start, stop + 1) if form != 4 else range(start, stop - 1, -1)
    question = (
        f"Count from {start} to {stop}.",
        f"Count from {start} to {stop}.",
        f"Please count from {start} to {stop}.",
        f"Count to {stop}.",
        f"Count down from {start} to {stop}.",
        f"Can you count from {start} to {stop}?",
    )[form]
    return f"{start}..{stop}|{form}", question, ", ".join(map(str, numbers))


def small_fact(rng: random.Random) -> Question:
    draw = rng.randrange(4)
    if draw == 0:
        pair = rng.choice(facts.OPPOSITE_PAIRS)
        one, other = pair if rng.random() < 0.5 else pair[::-1]
        question = f"What is the opposite of {one}?"
        return "", question, f"The opposite of {one} is {other}."
    names, unit = rng.choice([(facts.DAYS, "day"), (facts.MONTHS, "month")])
    at = rng.randrange(len(names))
    after = rng.random() < 0.6
    other = names[(at + (1 if after else -1)) % len(names)]
    word = "after" if after else "before"
    question = f"Which {unit} comes {word} {names[at]}?"
    return "", question, f"{other} comes {word} {names[at]}."


def repeat(rng: random.Random, words: int = 0) -> Question:
    """Copying, which is where looking back is learned first."""
    count = words or rng.randint(1, 7)
    make = [any_word, invented_word, code_word]
    text = " ".join(rng.choice(make)(rng) for _ in range(count))
    if not words and rng.random() < 0.2:
        text = filler_sentences(rng, 1)[0]
    form = rng.choice(["Repeat: {}", "Say: {}", "Repeat after me: {}"])
    return text, form.format(text), text


def person(rng: random.Random) -> tuple[str, int, str]:
    name = rng.choice(facts.NAMES)
    city = rng.choice(facts.CITIES + [capital for _, capital in facts.CAPITALS])
    if rng.random() < 0.35:
        name = invented_word(rng, 1, 3).capitalize()
    if rng.random() < 0.35:
        city = invented_word(rng, 2, 3).capitalize()
    return name, rng.randint(1, 99), city


_JSON_REQUESTS = (
    "Fill the JSON object from the sentence: {s}|Turn this into JSON: {s}|"
    "Extract name, age and city as JSON: {s}|Write as JSON: {s}|{s} Write this as JSON.|"
    "Give me a JSON object with name, age and city: {s}|JSON: {s}"
).split("|")
_PERSON_SENTENCES = (
    "{n} is {a} years old and lives in {c}.|{n} lives in {c} and is {a} years old.|"
    "My name is {n}, I am {a} years old and I live in {c}.|{n}, {a}, from {c}.|"
    "{n} from {c} is {a} years old.|In {c} lives {n}, who is {a} years old.|"
    "{n} is {a} and comes from {c}.|I am {n}, I am {a} and I come from {c}."
).split("|")


def json_object(rng: random.Random) -> Question:
    name, age, city = person(rng)
    sentence = rng.choices(_PERSON_SENTENCES, [4, 2, 1, 1, 1, 1, 1, 1])[0]
    sentence = sentence.format(n=name, a=age, c=city)
    request = rng.choices(_JSON_REQUESTS, [3, 2, 2, 1, 1, 1, 1])[0]
    answer = json.dumps({"name": name, "age": age, "city": city})
    return f"{name}|{age}|{city}", request.format(s=sentence), answer


def code_word_in_text(rng: random.Random, characters: int) -> Question:
    """A long text with a code word at a random depth, and the question for it."""
    word = code_word(rng)
    noun = rng.choices(["code word", "secret word", "password"], [8, 1, 1])[0]
    sentences = filler_sentences(rng, characters) if characters else []
    needle = rng.choice(
        ["The {n} is {w}.", "The {n} is {w}.", "The {n} is {w}."]
        + ["Remember: the {n} is {w}.", "Please remember that the {n} is {w}."]
    ).format(n=noun, w=word)
    sentences.insert(rng.randint(0, len(sentences)), needle)
    ask = rng.choice(
        ["What is the {n}?", "What is the {n}?", "What was the {n}?"]
        + ["Tell me the {n}.", "Which {n} was in the text?"]
    ).format(n=noun)
    gap = rng.choice([" ", "\n", "\n\n"])
    return word, " ".join(sentences) + gap + ask, f"The {noun} is {word}."


TASKS: dict[str, Callable[[random.Random], Question]] = {
    "capital": capital,
    "country of": country_of,
    "addition": addition,
    "subtraction": subtraction,
    "multiplication": multiplication,
    "spelling": spelling,
    "counting": counting,
    "small fact": small_fact,
    "repeat": repeat,
    "json": json_object,
}


def draw(task: str, rng: random.Random, test: bool) -> tuple[str, str]:
    """A question and answer from the training or the held-out side.

    Without a key a question is always trained, and asked in the evaluation
    only where the whole task consists of such questions.
    """
    while True:
        key, question, answer = TASKS[task](rng)
        usable = held_out(key) == test if key else not test or task == "small fact"
        if usable:
            return question, answer


def draw_code_word(rng: random.Random, characters: int, test: bool) -> tuple[str, str]:
    while True:
        word, question, answer = code_word_in_text(rng, characters)
        if held_out(word) == test:
            return question, answer
