"""A small grammar of children's stories.

Choices are weighted, the first ones clearly heavier: the trained model then
has a definite favourite at every branch, so greedy decoding does not hang on
the last bit of a rounded logit, while sampling still gives varied stories.
"""

import random
from collections.abc import Sequence

from demo_model.facts import ANIMALS, COLOURS, NAMES

TRAITS = "little clever brave quiet happy curious gentle kind young lazy".split()
PLACES = (
    "in a green forest|near a quiet river|on a small farm|by the blue sea|"
    "under an old oak tree|in a sunny garden|at the edge of a village|"
    "on top of a high hill|behind a red barn|in a warm and cosy house"
).split("|")
WANTS = (
    "find a new friend|see the big mountain|build a small boat|bake a sweet cake|"
    "learn to sing|find the lost golden key|cross the wide river|"
    "plant an apple tree|count all the stars|read a book about the moon"
).split("|")
PROBLEMS = (
    "it began to rain and the path was lost|the bridge over the river was broken|"
    "the night came and everything was dark|a strong wind blew the map away|"
    "there was nobody who knew the way|the door was locked and the key was gone|"
    "the road was long and the bag was heavy"
).split("|")
HELPS = (
    "showed the way home|shared some bread and honey|held up a bright lamp|"
    "gave good advice|carried the heavy bag|sang a song to give courage|"
    "knew a secret path through the trees"
).split("|")
FINDS = (
    "a shiny shell|a small wooden box|a {colour} feather|a round {colour} stone|"
    "an old letter|a basket full of apples|a tiny {colour} flower"
).split("|")
ENDS = (
    "From that day on they were the best of friends.|"
    "They laughed together and went home before dark.|"
    "That night they slept well and dreamed of new adventures.|"
    "In the end everybody was happy.|"
    "And so they learned that it is good to help each other.|"
    "They promised to meet again the next morning."
).split("|")
WEATHER = (
    "The sun was shining.|The sky was blue and the birds were singing.|"
    "It was a cold winter morning.|A soft wind blew through the leaves.|"
    "It was early in the morning and the grass was wet."
).split("|")

# Sentences without a plot, to fill long contexts.
_FILLER = (
    "The {animal} sleeps {place}.|{name} likes the {colour} house.|"
    "The market opens at {n} in the morning.|There are {n} trees {place}.|"
    "{name} and {name2} walked to the station.|The {animal} saw a {colour} bird.|"
    "The train leaves at {n} and the journey is long.|It rained for {n} days.|"
    "{name} bought {n} apples and a {colour} hat.|The water was cold and clear.|"
    "Nobody knew why the {animal} was so quiet.|The grass is green.|"
    "The sky is blue.|The sun is yellow.|Here we go.|There and back again.|"
    "The library has {n} books about the sea.|{name} wrote a letter to {name2}.|"
    "The old man told a story about a {animal} and a {animal2}.|"
    "In the evening the lamps were lit and people went home.|"
    "The {colour} door of the school was open.|Every morning {name} drinks tea."
).split("|")


def pick[T](rng: random.Random, options: Sequence[T], lean: float = 0.7) -> T:
    """One of the options, each less likely than the one before by ``lean``."""
    weights = [max(lean**i, 0.03) for i in range(len(options))]
    return rng.choices(options, weights)[0]


def with_article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def story(rng: random.Random, animal: str, opening: str | None = None) -> str:
    """A story of four to seven sentences about the animal."""
    opening = opening or pick(rng, ["Once upon a time", "Long ago", "One day", "Many years ago"], 0.5)
    trait, name = pick(rng, TRAITS), pick(rng, NAMES[:24], 0.85)
    helper = rng.choice([other for other in ANIMALS if other != animal])
    hero, find = f"the {animal}", pick(rng, FINDS)
    lines = [
        f"{opening} there was {with_article(trait)} {animal} named {name}.",
        f"{name} lived {pick(rng, PLACES)}.",
    ]
    if rng.random() < 0.35:
        lines.append(pick(rng, WEATHER))
    lines.append(f"One morning {name} wanted to {pick(rng, WANTS)}.")
    lines.append(f"But {pick(rng, PROBLEMS)}.")
    lines.append(f"Then {hero} met {with_article(helper)}, and the {helper} {pick(rng, HELPS)}.")
    if rng.random() < 0.35:
        found = find.format(colour=pick(rng, COLOURS))
        lines.append(f"On the way they found {found}.")
    lines.append(pick(rng, ENDS))
    return " ".join(lines)


def filler_sentence(rng: random.Random) -> str:
    names = rng.sample(NAMES, 2)
    animals = rng.sample(ANIMALS, 2)
    return rng.choice(_FILLER).format(
        name=names[0],
        name2=names[1],
        animal=animals[0],
        animal2=animals[1],
        colour=rng.choice(COLOURS),
        place=rng.choice(PLACES),
        n=rng.randint(2, 99),
    )


def filler_sentences(rng: random.Random, characters: int) -> list[str]:
    """About that many characters of plain sentences, varied or monotonous."""
    if rng.random() < 0.2:  # some people fill contexts by repeating themselves
        cycle = [filler_sentence(rng) for _ in range(rng.randint(1, 5))]
        return cycle * (characters // sum(len(s) + 1 for s in cycle) + 1)
    sentences: list[str] = []
    length = 0
    while length < characters:
        if rng.random() < 0.12:
            more = story(rng, rng.choice(ANIMALS)).split(". ")
            more = [s if s.endswith(".") else s + "." for s in more]
        else:
            more = [filler_sentence(rng)]
        sentences += more
        length += sum(len(s) + 1 for s in more)
    return sentences
