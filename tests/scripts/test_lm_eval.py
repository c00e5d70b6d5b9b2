"""The tasks of lm-evaluation-harness: what they name is there, and every question has an answer."""

import importlib.util
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "scripts/lm_eval"


class Loader(yaml.SafeLoader):
    """Reads `!function module.name` as that text."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def test_tasks_name_functions_and_their_rows_have_what_they_ask_for():
    spec = importlib.util.spec_from_file_location("questions", FOLDER / "questions.py")
    questions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(questions)
    tasks = [yaml.load(path.read_text(encoding="utf-8"), Loader) for path in sorted(FOLDER.glob("*.yaml"))]
    assert [task["task"] for task in tasks] == [path.stem for path in sorted(FOLDER.glob("*.yaml"))]
    for task in tasks:
        module, _, function = task["custom_dataset"].partition(".")
        assert module == "questions" and callable(getattr(questions, function))
    rows = questions.questions_of_the_card()
    assert len(rows) == 10 * questions.NUM_QUESTIONS and all(row["question"] and row["answer"] for row in rows)
    choices = questions.choices_of_capitals()
    assert len(choices) > 150
    assert all(len(set(row["choices"])) == questions.NUM_CHOICES and 0 <= row["answer"] < 4 for row in choices)
