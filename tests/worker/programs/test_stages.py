"""Which tokens a step begins with where several are on their way: those of its own requests, and no later ones."""

import numpy as np

from jaxpaged.worker.programs.stages import StagedRows, rows_that_drew
from jaxpaged.worker.step.packed import step_layout

BEGIN = StagedRows(("first", "last"), ("nothing",), (frozenset(),))


def test_a_step_begins_with_the_newest_tokens_of_its_requests_and_waits_for_no_others():
    rows = BEGIN.after("last 1", "tokens 1", frozenset({0, 1})).after("last 2", "tokens 2", frozenset({2, 3}))
    assert rows.stages == ("first", "last 2")
    assert rows.tokens_for(frozenset({0, 1})) == "tokens 1", "step 2 draws while step 3 begins"
    assert rows.tokens_for(frozenset({3})) == rows.tokens_for(frozenset({0, 3})) == "tokens 2"
    assert rows.tokens_for(frozenset()) == "nothing", "a prompt waits for nobody"


def test_tokens_that_are_kept_no_longer_are_in_every_copy_that_is():
    rows = BEGIN
    for step in range(1, 6):
        rows = rows.after("last", f"tokens {step}", frozenset({step}))
    assert rows.drawn == ("tokens 3", "tokens 4", "tokens 5")
    assert rows.tokens_for(frozenset({1})) == "tokens 3" and rows.tokens_for(frozenset({4})) == "tokens 4"


def test_the_host_does_not_know_the_tokens_of_those_whose_place_the_device_knows():
    layout = step_layout(8, 4, [16])
    packed = np.zeros(layout.size, np.int32)
    parts = layout.split(packed)
    parts.rows_R[:], parts.seq_lens_R[:] = [3, 1, 4, 4], [-1, 7, -1, 0]
    assert rows_that_drew(layout, packed) == {3, 4}
