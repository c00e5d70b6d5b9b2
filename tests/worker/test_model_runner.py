"""What the runner says of programs that ordinary steps do not need; the steps themselves are tested end to end."""

from types import SimpleNamespace

import pytest

from jaxpaged.errors import EngineError
from jaxpaged.sampling_features import Extra
from jaxpaged.worker.blueprint import MASKED_KIND
from jaxpaged.worker.model_runner import ModelRunner
from jaxpaged.worker.programs import ProgramKey, Programs

SIZES = (2, 8, 16)
EVERY = [
    *(ProgramKey(kind, size) for kind in (MASKED_KIND, "sample_full") for size in SIZES),
    ProgramKey("prompt_logprobs"), ProgramKey("load_row"), ProgramKey("load_tokens"),
]  # fmt: skip
NEEDED = {
    Extra.MASKS: {(MASKED_KIND, 16)},
    Extra.PROMPT_LOGPROBS: {("prompt_logprobs", 0)},
    Extra.FULL_SAMPLER: {("sample_full", 16), ("load_row", 0), ("load_tokens", 0)},
}


def runner_with(builders):
    runner = ModelRunner.__new__(ModelRunner)  # of a runner only its table of programs is asked
    runner.programs, runner.sample_buckets = Programs(builders, num_threads=1, on_demand=list(builders)), SIZES
    return runner


@pytest.mark.parametrize("extra", Extra)
def test_steps_can_run_once_the_programs_for_any_number_of_requests_are_there(extra):
    runner = runner_with({key: lambda key=key: SimpleNamespace(compile=lambda: key) for key in EVERY})
    while not runner.can_run(extra):
        pass
    programs = runner.programs
    assert set(programs.wait_all()) == NEEDED[extra], "others, and narrower ones, wait until a step could use them"
    for kind, size in NEEDED[extra]:
        assert not size or programs.smallest_ready(kind, 1, SIZES) == 16


@pytest.mark.parametrize("extra", Extra)
def test_a_program_that_cannot_be_compiled_is_told_without_its_innards(extra):
    def fail():
        raise ValueError("at /srv/model.py:7")

    runner = runner_with(dict.fromkeys(EVERY, fail))
    assert not runner.can_run(extra)
    while not runner.programs.num_ready:
        pass
    with pytest.raises(EngineError, match="could not be compiled; the engine's log says why") as caught:
        runner.can_run(extra)
    assert "srv" not in str(caught.value)
