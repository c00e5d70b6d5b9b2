import pytest

from jaxpaged.engine.observability.step_times import mean_per_step, padding, step_sizes
from tests.tools.pictures.records import record


@pytest.mark.parametrize(("tokens", "num_steps", "sizes"), [(5, 1, [5]), (9, 4, [3, 2, 2, 2]), (0, 0, [])])
def test_the_sizes_of_the_steps_of_a_run_add_up(tokens, num_steps, sizes):
    run = record(tokens=tokens, bucket=8, num_steps=num_steps)
    assert step_sizes(run) == sizes
    assert padding(run) == sum(8 - size for size in sizes)
    assert mean_per_step(run, tokens) * num_steps == tokens
