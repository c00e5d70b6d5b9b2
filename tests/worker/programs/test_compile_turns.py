"""Turns among processes, here among threads with files of their own: one compiles, others wait, and nobody for ever."""

import threading

from jaxpaged.messages import ProgramKey
from jaxpaged.worker.programs import compiled
from jaxpaged.worker.programs.compiled import CompileTurns

KEY = ProgramKey("forward", 8)


def taken(turns, key, began):
    def work():
        with turns.turn(key):
            began.set()

    threading.Thread(target=work, daemon=True).start()


def test_the_same_program_takes_turns_and_others_do_not_wait(tmp_path):
    first, second, other = (CompileTurns(str(tmp_path), purpose) for purpose in ("a", "a", "b"))
    same, another_key, another_purpose = threading.Event(), threading.Event(), threading.Event()
    with first.turn(KEY):
        taken(second, KEY, same)
        taken(second, ProgramKey("forward", 16), another_key)
        taken(other, KEY, another_purpose)
        assert another_key.wait(5) and another_purpose.wait(5) and not same.is_set()
    assert same.wait(5)


def test_a_turn_that_does_not_end_is_not_awaited_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "LONGEST_WAIT", 0.1)
    turns, began = CompileTurns(str(tmp_path), "a"), threading.Event()
    with turns.turn(KEY):
        taken(turns, KEY, began)
        assert began.wait(5)


def test_an_error_gives_the_turn_back(tmp_path):
    turns, began = CompileTurns(str(tmp_path), "a"), threading.Event()
    try:
        with turns.turn(KEY):
            raise RuntimeError("it does not compile")
    except RuntimeError:
        taken(turns, KEY, began)
    assert began.wait(5)
