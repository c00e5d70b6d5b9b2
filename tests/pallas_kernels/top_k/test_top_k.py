"""The largest of every row against a sort by numpy, on this CPU and as one with fewer instructions would find them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import top_k as op
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.top_k import cpu
from pallas_kernels.top_k.cases import CASES, Case

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)
STRANGE = np.array(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0, 0x80000000, 1, 0x80000001], np.uint32
).view(np.float32)  # infinities, NaN, zeros, denormal numbers


def make_rows(case: Case) -> np.ndarray:
    rng = np.random.default_rng(0)
    shape = (case.num_rows, case.num_columns)
    x_SV = rng.normal(size=shape).astype(np.float32)
    match case.kind:
        case "equal":
            return np.full(shape, -3.5, np.float32)
        case "tied":
            return rng.integers(-3, 4, shape).astype(np.float32)
        case "masked":
            return np.where(rng.random(shape) < 0.001, x_SV, -np.inf).astype(np.float32)
        case "rising":
            return np.sort(x_SV, axis=1)
        case "falling":
            return -np.sort(x_SV, axis=1)
        case "crowded":
            x_SV[:, 1000:2000] += 50
        case "strange":
            return np.where(rng.random(shape) < 0.3, rng.choice(STRANGE, shape), x_SV).astype(np.float32)
    return x_SV


def sorted_by_numpy(x_SV: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """By the bits as whole numbers of the same order, which is too simple to be wrong; of equal ones the left first."""
    bits_SV = x_SV.view(np.int32).astype(np.int64)
    key_SV = np.where(bits_SV < 0, -(bits_SV & 0x7FFFFFFF) - 1, bits_SV)
    columns_SC = np.argsort(-key_SV, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(x_SV, columns_SC, axis=1), columns_SC


def check(found: tuple[jax.Array, jax.Array], x_SV: np.ndarray, count: int) -> None:
    values_SC, columns_SC = map(np.asarray, found)
    expected_SC, expected_columns_SC = sorted_by_numpy(x_SV, count)
    assert (values_SC.dtype, columns_SC.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(columns_SC, expected_columns_SC)
    np.testing.assert_array_equal(values_SC.view(np.int32), expected_SC.view(np.int32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_equals_a_sort(case):
    x_SV = make_rows(case)
    check(op.top_k(jnp.asarray(x_SV), case.count, backend="reference"), x_SV, case.count)


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_of_every_machine_find_a_case(case):
    x_SV = make_rows(case)
    for machine in dict.fromkeys([this_machine(), AVX2]):
        check(cpu.top_k(jnp.asarray(x_SV), case.count, machine), x_SV, case.count)


@needs_kernels
@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_columns=st.integers(1, 90))
def test_any_row_is_in_the_order_of_a_sort(data, num_columns):
    """Few distinct values, so that there are many equal ones, at the ends of what is let in too."""
    count = data.draw(st.sampled_from([c for c in (1, 2, 7, 33) if c <= num_columns]))
    numbers = st.sampled_from([*STRANGE.tolist(), -1.0, 0.5, 2.0])
    x_SV = np.array([data.draw(st.lists(numbers, min_size=num_columns, max_size=num_columns))], np.float32)
    check(op.top_k(jnp.asarray(x_SV), count, backend="cpu"), x_SV, count)


@needs_kernels
def test_what_lies_around_a_row_is_not_looked_at():
    around = np.full((5, 77), np.inf, np.float32)
    around[2] = np.random.default_rng(1).normal(size=77)
    found = jax.jit(lambda x: op.top_k(x[2:3], 10, backend="cpu"))(around)
    check(found, around[2:3], 10)


def test_other_operands_are_refused_by_name():
    x_SV = jnp.zeros((2, 8))
    for x, count, message in (
        (x_SV.astype(jnp.bfloat16), 2, r"x_SV is bfloat16\[2, 8\]"),
        (x_SV[0], 2, r"x_SV is float32\[8\]"),
        (x_SV, -1, "count is -1; accepted are 0 to 8"),
        (x_SV, 9, "count is 9; accepted are 0 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            op.top_k(x, count, backend="reference")


@needs_kernels
def test_auto_takes_the_kernel_on_a_cpu_for_as_many_as_it_finds():
    row = jax.ShapeDtypeStruct((1, 4096), jnp.float32)
    assert op.choose_backend("auto", "cpu") == "cpu"
    assert op.choose_backend("auto", "cpu", row, 1024) == "cpu"
    assert op.choose_backend("auto", "cpu", row, 1025) == "reference"
    assert op.choose_backend("auto", "cpu", row, 0) == op.choose_backend("auto", "gpu", row, 8) == "reference"
    with pytest.raises(ValueError, match="count is 1025; accepted are 1 to 1024"):
        op.top_k(jnp.zeros((1, 4096)), 1025, backend="cpu")
