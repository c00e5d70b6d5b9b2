"""What the runner says of masked steps before there is any; the steps themselves are tested end to end."""

from types import SimpleNamespace

import pytest

from jaxpaged.errors import EngineError
from jaxpaged.worker.blueprint import MASKED_KIND
from jaxpaged.worker.model_runner import ModelRunner
from jaxpaged.worker.programs import ProgramKey, Programs


def test_steps_can_be_masked_once_the_program_for_any_number_of_requests_is_there():
    keys = [ProgramKey(MASKED_KIND, size) for size in (2, 8, 16)]
    builders = {key: lambda key=key: SimpleNamespace(compile=lambda: key) for key in keys}
    programs = Programs(builders, num_threads=1, on_demand=keys)
    runner = SimpleNamespace(programs=programs, sample_buckets=(2, 8, 16))
    while not ModelRunner.can_mask(runner):
        pass
    assert programs.smallest_ready(MASKED_KIND, 1, (2, 8, 16)) == 16
    assert programs.num_wanted == 1, "the narrower ones wait until a step could use them"


def test_a_program_that_cannot_be_compiled_is_told_without_its_innards():
    def fail():
        raise ValueError("at /srv/model.py:7")

    key = ProgramKey(MASKED_KIND, 2)
    runner = SimpleNamespace(programs=Programs({key: fail}, on_demand=[key]), sample_buckets=(2,))
    assert not ModelRunner.can_mask(runner)
    while not runner.programs.num_ready:
        pass
    with pytest.raises(EngineError, match="could not be compiled; the engine's log says why") as caught:
        ModelRunner.can_mask(runner)
    assert "srv" not in str(caught.value)
