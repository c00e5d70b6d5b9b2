"""Products of few rows against numpy in float64, on this CPU and as one with fewer instructions would compute them."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul import cpu
from pallas_kernels.few_rows_matmul.cases import CASES, Case
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from tests.pallas_kernels.few_rows_matmul.products import check, make_operands

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
# What the kernels can do without AVX512, and with it but without its products of pairs: every x86 machine of ten years
# has the former, and this one the latter if it has AVX512 at all.
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)


def machines() -> list[Machine]:
    """This one, and lesser ones that it can stand for."""
    here = this_machine()
    plain = here.features.replace("+avx512bf16", "-avx512bf16").replace("+avx512vnni", "-avx512vnni")
    return list(dict.fromkeys([here, Machine(here.name, plain, here.lanes, here.num_registers), AVX2]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_equals_the_product_in_float64(case):
    x_TD, weight_FD = make_operands(case)
    check(case, op.few_rows_matmul(jnp.asarray(x_TD), jnp.asarray(weight_FD), backend="reference"), x_TD, weight_FD)


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_of_every_machine_compute_a_case(case):
    x_TD, weight_FD = make_operands(case)
    for machine in machines():
        sums_TF = cpu.few_rows_matmul(jnp.asarray(x_TD), jnp.asarray(weight_FD), op.SUMS[case.dtype], machine)
        check(case, sums_TF, x_TD, weight_FD)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("num_rows", [3, 31])
def test_sums_of_bfloat16_are_rounded_once(backend, num_rows):
    """To the nearest number, to the even one of two as near; what is not finite stays so, and denormal numbers are."""
    x_TD, weight_FD = np.zeros((num_rows, 70)), np.zeros((40, 70))
    weight_FD[:, 0], weight_FD[:, 69] = 1, np.linspace(-3, 5, 40)
    x_TD[:, 0] = np.arange(num_rows) - 1.5
    x_TD[:, 69] = 2.0**-8
    x_TD[0, 0], x_TD[1, 5], x_TD[2] = np.inf, np.nan, 0
    x_TD[2, 0] = 1e-39
    operands = [jnp.asarray(each, jnp.bfloat16) for each in (x_TD, weight_FD)]
    sums_TF = op.few_rows_matmul(*operands, backend=backend)
    rounded_TF = op.few_rows_matmul(*operands, backend=backend, dtype=jnp.bfloat16)
    assert rounded_TF.dtype == jnp.bfloat16
    expected_TF = np.asarray(sums_TF).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rounded_TF, np.float32), expected_TF.astype(np.float32))


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_what_lies_around_operands_is_never_read_into_a_sum_and_rows_stay_apart(dtype):
    """Rows and weights lie in larger arrays, at odd places, with NaN (or the largest numbers) around them."""
    num_inputs, num_outputs = 75, 9
    rng = np.random.default_rng(1)
    poison = 127 if dtype == "int8" else np.nan
    around = np.full((20, num_inputs), poison).astype(dtype)
    x_TD, weight_FD = around.copy(), around.copy()
    x_TD[3:6], weight_FD[5 : 5 + num_outputs] = (
        rng.integers(-9, 9, (3, num_inputs)),
        rng.integers(-9, 9, (num_outputs, num_inputs)),
    )
    expected = x_TD[3:6].astype(np.float64) @ weight_FD[5 : 5 + num_outputs].astype(np.float64).T
    if dtype == "bfloat16":
        x_TD[4, 70], expected[1] = np.nan, np.nan  # of one row, in the last inputs: it stays there
    product = jax.jit(lambda x, w: op.few_rows_matmul(x[3:6], w[5 : 5 + num_outputs], backend="cpu"))
    np.testing.assert_array_equal(product(x_TD, weight_FD), expected)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize(("num_rows", "num_inputs"), [(3, 70), (10, 197), (16, 64), (31, 133), (67, 3), (200, 131)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_planes_are_as_close_as_16_bits(backend, num_rows, num_inputs, dtype):
    """Rows of all sizes, of zeros, and with what is not finite, first and last: none changes another."""
    rng = np.random.default_rng(2)
    x_TD = rng.normal(size=(num_rows, num_inputs)) * 10.0 ** rng.integers(-9, 9, (num_rows, 1))
    x_TD[1] = 0
    x_TD = np.asarray(jnp.asarray(x_TD, jnp.bfloat16).astype(jnp.float32), np.float64)
    weight_FD, scale_F = rng.integers(-127, 128, (70, num_inputs)).astype(np.int8), rng.random(70).astype(np.float32)
    product = jax.jit(lambda x, w, scale: op.two_plane_matmul(x, w, scale, dtype=dtype, backend=backend))
    found_TF = np.asarray(product(jnp.asarray(x_TD, jnp.bfloat16), weight_FD, scale_F), np.float64)
    expected_TF = x_TD @ weight_FD.astype(np.float64).T * scale_F
    sizes_F = np.abs(weight_FD).astype(np.float64).sum(1) * scale_F
    bound_TF = np.abs(x_TD).max(1, keepdims=True) / 127 / 508 * sizes_F * 1.001 + 1e-6 * np.abs(expected_TF)
    bound_TF += 2.0**-8 * np.abs(expected_TF) if dtype == "bfloat16" else 0
    assert np.all(np.abs(found_TF - expected_TF) <= bound_TF) and not found_TF[1].any()
    broken_TD = x_TD.copy()
    broken_TD[0, 0], broken_TD[-1, 0] = np.inf, np.nan
    broken_TF = np.asarray(product(jnp.asarray(broken_TD, jnp.bfloat16), weight_FD, scale_F), np.float64)
    assert not np.isfinite(broken_TF[0]).any() and not np.isfinite(broken_TF[-1]).any()
    np.testing.assert_array_equal(broken_TF[1:-1], found_TF[1:-1])


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stored_program_can_have_its_kernel_again(case):
    if op.backends("cpu", *map(jnp.asarray, make_operands(case)))["cpu"] is not None:
        pytest.skip("XLA multiplies so many rows on this machine")
    operands = map(jnp.asarray, make_operands(case))
    program = jax.jit(lambda *operands: op.few_rows_matmul(*operands, backend="cpu")).lower(*operands).compile()
    names = calls_in(program.as_text())
    prepare(names)
    assert names and all(name.startswith(f"pallas_kernels.few_rows_matmul.{case.dtype}.") for name in names)


@needs_kernels
@pytest.mark.parametrize(
    ("num_rows", "companies"),
    [(14, ([0], [3, 7], [2, 5, 1])), (64, (range(40, 56), range(3, 50), [*range(64), *range(40)]))],
)
def test_a_row_has_the_same_bits_in_any_company(num_rows, companies):
    """Among a few rows, and in blocks of rows."""
    x_TD, weight_FD = make_operands(Case("", num_rows, 333, 70))
    together = op.few_rows_matmul(jnp.asarray(x_TD), jnp.asarray(weight_FD), backend="cpu")
    for rows in map(list, companies):
        alone = op.few_rows_matmul(jnp.asarray(x_TD[rows]), jnp.asarray(weight_FD), backend="cpu")
        np.testing.assert_array_equal(np.asarray(together)[rows], alone)


BITS = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
import jax, numpy as np
from pallas_kernels.few_rows_matmul import few_rows_matmul
rng = np.random.default_rng(0)
x, weight = (jax.numpy.asarray(rng.normal(size=shape).astype("bfloat16")) for shape in ((3, 512), (2000, 512)))
product = jax.jit(lambda: few_rows_matmul(x, weight, backend="cpu"))
found = {hashlib.sha256(np.asarray(product()).tobytes()).hexdigest() for _ in range(50)}
print(len(found), *found)
"""


@needs_kernels
@pytest.mark.slow
def test_threads_change_no_bit():
    """XLA has as many threads as the process may use cores, and chunks go to whoever is free."""
    found = {
        subprocess.run(
            [sys.executable, "-c", BITS, str(num_threads)],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "XLA_FLAGS": ""},
        ).stdout
        for num_threads in (1, 8)
    }
    assert len(found) == 1 and found.pop().startswith("1 ")


def test_other_operands_of_planes_are_refused_by_name():
    x_TD, weight_FD, scale_F = jnp.zeros((2, 8)), jnp.zeros((4, 8), jnp.int8), jnp.zeros(4)
    for operands, message in (
        ((x_TD.astype(jnp.int8), weight_FD, scale_F), "x_TD is int8"),
        ((x_TD, weight_FD[:, :7], scale_F), r"weight_FD is int8\[4, 7\]; accepted is int8\[4, 8\]"),
        ((x_TD, weight_FD, scale_F[:3]), r"scale_F is float32\[3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            op.two_plane_matmul(*operands, dtype="float32", backend="reference")


def test_other_operands_are_refused_by_name():
    x_TD, weight_FD = jnp.zeros((2, 8), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16)
    for x, weight, message in (
        (x_TD.astype(jnp.float32), weight_FD, "x_TD is float32"),
        (x_TD, weight_FD.astype(jnp.int8), "weight_FD is int8"),
        (x_TD, weight_FD[:, :7], r"weight_FD is bfloat16\[4, 7\]"),
        (x_TD[0], weight_FD, r"x_TD is bfloat16\[8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            op.few_rows_matmul(x, weight, backend="reference")
    for operands, dtype in (((x_TD, weight_FD), "float16"), ((jnp.zeros((2, 8), jnp.int8),) * 2, "bfloat16")):
        with pytest.raises(ValueError, match=f"dtype is {dtype}; sums of"):
            op.few_rows_matmul(*operands, backend="reference", dtype=dtype)
    with pytest.raises(ValueError, match="unknown few_rows_matmul backend 'tpu'"):
        op.few_rows_matmul(x_TD, weight_FD, backend="tpu")


@needs_kernels
def test_auto_takes_the_kernels_on_a_cpu_only_and_for_few_rows_where_blocks_are_not(monkeypatch):
    rows = lambda number: jax.ShapeDtypeStruct((number, 8), jnp.bfloat16)
    assert op.choose_backend("auto", "cpu") == "cpu"
    assert op.choose_backend("auto", "cpu", rows(8), rows(4)) == "cpu"
    assert op.choose_backend("auto", "tpu", rows(2), rows(4)) == "reference"
    many = rows(cpu.MOST_ROWS["bfloat16"] + 1)
    assert (op.choose_backend("auto", "cpu", many, rows(4)) == "cpu") == cpu.has_blocks("bfloat16", this_machine())
    monkeypatch.setattr(cpu, "this_machine", lambda: AVX2)
    assert op.choose_backend("auto", "cpu", rows(8), rows(4)) == "cpu"
    assert op.choose_backend("auto", "cpu", many, rows(4)) == "reference"
    with pytest.raises(
        ValueError, match=f"x_TD has 65 rows; accepted are 1 to {cpu.MOST_ROWS['bfloat16']} of bfloat16"
    ):
        op.few_rows_matmul(jnp.zeros((65, 8), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16), backend="cpu")
