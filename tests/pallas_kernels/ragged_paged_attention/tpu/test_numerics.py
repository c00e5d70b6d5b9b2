"""The TPU kernels in JAX's simulator of a TPU, with its race detector, against dense attention in float64."""

import itertools

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import ragged_paged_attention as rpa
from pallas_kernels.ragged_paged_attention.cases import BOTH_WAYS_CASES, CASES, SHARED_CASES, Case
from pallas_kernels.ragged_paged_attention.tpu import TpuBackend
from tests.pallas_kernels.ragged_paged_attention.one_step import check_case, marks

CASE = {case.name: case for case in CASES}
ALL = (*CASES, *SHARED_CASES, *BOTH_WAYS_CASES)
BACKEND = "tpu-interpret"
# Every kind of mask and layout once; the others take minutes, and are the same code with other sizes. They take the two
# types in turn: what a type changes does not depend on the case.
QUICK = (
    ("decodes and prompts in any order", jnp.bfloat16),
    ("group of 8, keys of 192 and values of 128, block_size 128", jnp.bfloat16),
    ("rows that share beginnings, window, soft cap and sinks", jnp.float32),
    ("both ways, window shorter than runs", jnp.float32),
)


@pytest.fixture(autouse=True)
def detect_races(monkeypatch):
    """A race or a read outside of a buffer raises. What is copied is there when it is waited for, not before."""
    monkeypatch.setitem(rpa._BACKENDS, BACKEND, TpuBackend(interpret=pltpu.InterpretParams(detect_races=True)))
    yield
    pltpu.reset_tpu_interpret_mode_state()


def is_taken(case: Case, dtype) -> bool:
    return case.block_size % (32 // jnp.dtype(dtype).itemsize) == 0


def all_cases():
    for case, dtype in zip(ALL, itertools.cycle((jnp.float32, jnp.bfloat16))):
        quick = dict(QUICK).get(case.name)
        dtype = quick or (dtype if is_taken(case, dtype) else jnp.float32)
        if is_taken(case, dtype):
            name = f"{case.name}, {jnp.dtype(dtype)}"
            yield pytest.param(case, dtype, id=name, marks=marks(quick is not None))


@pytest.mark.parametrize(("case", "dtype"), list(all_cases()))
def test_a_case_equals_dense_attention_and_changes_only_the_slots_of_its_new_tokens(case, dtype):
    check_case(case, dtype, BACKEND)
