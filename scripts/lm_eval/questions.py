"""The embedded model's held-out questions for lm-evaluation-harness: what the tasks beside this file name."""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the harness imports this file alone

from demo_model import corpus, facts, tasks

NUM_QUESTIONS = 200
"""Of each kind, as in the model card."""
NUM_CHOICES = 4


def held_out(**settings: Any) -> dict[str, Any]:
    return {"test": dataset(questions_of_the_card())}


def capitals(**settings: Any) -> dict[str, Any]:
    return {"test": dataset(choices_of_capitals())}


def dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset  # comes with the harness

    return Dataset.from_list(rows)


def questions_of_the_card() -> list[dict[str, Any]]:
    """Those of the model card's first table, but for the code words."""
    rows = []
    for task in tasks.TASKS:
        rng = corpus.stream(0, f"evaluation {task}")
        drawn = [tasks.draw(task, rng, test=True) for _ in range(NUM_QUESTIONS)]
        rows += [{"task": task, "question": question, "answer": answer} for question, answer in drawn]
    return rows


def choices_of_capitals() -> list[dict[str, Any]]:
    """Every country's capital among others; `answer` is the place of the right one."""
    rng, rows = random.Random(0), []
    cities = [city for _, city in facts.CAPITALS]
    for country, city in facts.CAPITALS:
        shown = [city, *rng.sample([each for each in cities if each != city], NUM_CHOICES - 1)]
        rng.shuffle(shown)
        choices = [f"The capital of {country} is {each}." for each in shown]
        rows.append({"question": f"What is the capital of {country}?", "choices": choices, "answer": shown.index(city)})
    return rows
