"""Sorting by group against numpy's stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sort_by_group as op
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import why_not
from pallas_kernels.sort_by_group.cases import CASES

BACKENDS = ("reference", *(("cpu",) if why_not() is None else ()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_things_are_in_the_order_of_their_groups_and_know_their_places(case, backend):
    rng = np.random.default_rng(0)
    group_P = rng.integers(0, case.num_used, case.num_things).astype(np.int32)
    group_P[rng.random(case.num_things) < 0.1] = case.num_groups  # of none
    group_P[-1] += 1000 * (group_P[-1] == case.num_groups)
    sort = jax.jit(lambda group_P: op.sort_by_group(group_P, case.num_groups, backend=backend))
    for _ in range(2):  # what the counts held before does not matter
        order_P, place_P = map(np.asarray, sort(group_P))
    np.testing.assert_array_equal(order_P, np.argsort(np.minimum(group_P, case.num_groups), kind="stable"))
    np.testing.assert_array_equal(order_P[place_P], np.arange(case.num_things))
    assert order_P.dtype == place_P.dtype == np.int32


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_cpu_counts_and_a_stored_program_can_have_its_kernel_again():
    assert op.choose_backend("auto", "cpu") == "cpu" and op.choose_backend("auto", "tpu") == "reference"
    sort = jax.jit(lambda group_P: op.sort_by_group(group_P, 4, backend="cpu"))
    text = sort.lower(jnp.zeros(9, jnp.int32)).compile().as_text()
    (name,) = calls_in(text)
    prepare([name])
    assert name.startswith("pallas_kernels.sort_by_group.") and " sort(" not in text


def test_other_operands_are_refused_by_name():
    with pytest.raises(ValueError, match=r"group_P is float32\[3\]; accepted is int32\[P\]"):
        op.sort_by_group(jnp.zeros(3), 4, backend="reference")
    with pytest.raises(ValueError, match="unknown sort_by_group backend 'gpu'"):
        op.sort_by_group(jnp.zeros(3, jnp.int32), 4, backend="gpu")
