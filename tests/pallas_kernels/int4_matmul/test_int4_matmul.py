"""Products with weights in 4 bits against numpy in float64, on this CPU and as one with fewer instructions."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4_matmul as op
from pallas_kernels.int4_matmul import cpu
from pallas_kernels.int4_matmul.cases import CASES, Case
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.testing import tolerance

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)


def machines() -> list[Machine]:
    """This one, and lesser ones that it can stand for."""
    here = this_machine()
    plain = here.features.replace("+avx512vnni", "-avx512vnni")
    return list(dict.fromkeys([here, Machine(here.name, plain, here.lanes, here.num_registers), AVX2]))


def make_operands(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, packed weights and their scales, drawn as they are: every value and sign of a scale comes up."""
    rng = np.random.default_rng(seed)
    x_TD = rng.normal(size=(case.num_rows, case.num_inputs)).astype(jnp.dtype(case.dtype))
    packed_FB = rng.integers(0, 256, (case.num_outputs, case.num_inputs // 2), np.uint8)
    scale_FC = rng.normal(size=(case.num_outputs, case.num_inputs // op.GROUP)).astype(jnp.bfloat16)
    return x_TD, packed_FB, scale_FC


def weights_of(packed_FB: np.ndarray, scale_FC: np.ndarray) -> np.ndarray:
    """In float64, value by value, as the op's docstring says."""
    F, C = scale_FC.shape
    weight_FD = np.empty((F, C * 32))
    for d in range(C * 32):
        group, place = divmod(d, 32)
        byte_F = packed_FB[:, group * 16 + place % 16]
        value_F = byte_F & 15 if place < 16 else byte_F >> 4
        weight_FD[:, d] = (value_F.astype(np.float64) - 8) * scale_FC[:, group].astype(np.float64)
    return weight_FD


def check(case: Case, sums_TF: jax.Array, operands: tuple[np.ndarray, ...], by_kernel: bool) -> None:
    """Kernels make rows of bfloat16 whole numbers of 8 bits; XLA multiplies weights that were rounded to bfloat16."""
    rounded = case.dtype == "bfloat16"
    x_TD, weight_FD = operands[0].astype(np.float64), weights_of(*operands[1:])
    expected = x_TD @ weight_FD.T
    assert sums_TF.dtype == jnp.float32 and sums_TF.shape == expected.shape
    sizes_TF = np.abs(x_TD) @ np.abs(weight_FD).T
    bound = tolerance(np.float32, case.num_inputs) + (2**-9 if rounded and not by_kernel else 0)
    half_step_TC = np.abs(x_TD).reshape(len(x_TD), -1, 32).max(axis=2) / 254 * (rounded and by_kernel)
    weight_FC = np.abs(weight_FD).reshape(len(weight_FD), half_step_TC.shape[1], -1).sum(axis=2)
    most_TF = bound * sizes_TF + half_step_TC @ weight_FC.T
    assert np.all(np.abs(np.asarray(sums_TF, np.float64) - expected) <= most_TF)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_equals_the_product_in_float64(case):
    operands = make_operands(case)
    check(case, op.int4_matmul(*map(jnp.asarray, operands), backend="reference"), operands, by_kernel=False)


@needs_kernels
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_of_every_machine_compute_a_case(case):
    operands = make_operands(case)
    for machine in machines():
        check(case, cpu.int4_matmul(*map(jnp.asarray, operands), machine), operands, by_kernel=True)


@needs_kernels
def test_every_machine_writes_the_weights_that_xla_writes():
    _, packed_FB, scale_FC = map(jnp.asarray, make_operands(Case("", 1, 192, 67)))
    for machine in machines():
        kernel = cpu.kernel(cpu.UNPACKED, machine=machine)
        call = jax.ffi.ffi_call(kernel, jax.ShapeDtypeStruct((67, 192), jnp.float32))
        np.testing.assert_array_equal(call(packed_FB, scale_FC), op.unpack(packed_FB, scale_FC))


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_lies_around_operands_is_never_read_into_a_sum_and_rows_stay_apart(dtype):
    """They lie in larger arrays, with NaN (or the largest bytes) around them, and one row has a NaN of its own."""
    case = Case("", 3, 128, 9, dtype)
    operands = make_operands(case)
    around = [
        np.full((20, part.shape[1]), 255 if part.dtype == np.uint8 else np.nan).astype(part.dtype) for part in operands
    ]
    for larger, part in zip(around, operands):
        larger[5 : 5 + len(part)] = part
    around[0][6, 70] = np.nan
    own = lambda parts: [larger[5 : 5 + len(part)] for larger, part in zip(parts, operands)]
    found = np.asarray(jax.jit(lambda *parts: op.int4_matmul(*own(parts), backend="cpu"))(*around))
    assert np.isnan(found[1]).all()
    kept = (operands[0][[0, 2]], *operands[1:])
    check(Case("", 2, 128, 9, dtype), jnp.asarray(found[[0, 2]]), kept, by_kernel=True)


@needs_kernels
@pytest.mark.parametrize("num_inputs", [320, 384])
def test_a_row_has_the_same_bits_in_any_company(num_inputs):
    x_TD, *weight = map(jnp.asarray, make_operands(Case("", 32, num_inputs, 70)))
    together = op.int4_matmul(x_TD, *weight, backend="cpu")
    for rows in ([0], [3, 17], [2, 30, 1, 9, 8, 7, 6, 5, 4]):
        alone = op.int4_matmul(x_TD[jnp.asarray(rows)], *weight, backend="cpu")
        np.testing.assert_array_equal(np.asarray(together)[rows], alone)


BITS = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])
import jax, numpy as np
from pallas_kernels.int4_matmul import int4_matmul
rng = np.random.default_rng(0)
x, scales = (jax.numpy.asarray(rng.normal(size=shape).astype("bfloat16")) for shape in ((3, 512), (2000, 16)))
packed = jax.numpy.asarray(rng.integers(0, 256, (2000, 256), np.uint8))
product = jax.jit(lambda: int4_matmul(x, packed, scales, backend="cpu"))
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


def test_other_operands_are_refused_by_name():
    x_TD, packed_FB, scale_FC = jnp.zeros((2, 64)), jnp.zeros((4, 32), jnp.uint8), jnp.zeros((4, 2), jnp.bfloat16)
    for operands, message in (
        ((x_TD.astype(jnp.int8), packed_FB, scale_FC), "x_TD is int8"),
        ((x_TD[:, :32], packed_FB, scale_FC), "multiple of 64 inputs"),
        ((x_TD, packed_FB[:, :31], scale_FC), r"packed_FB is uint8\[4, 31\]; accepted is uint8\[4, 32\]"),
        ((x_TD, packed_FB, scale_FC[:3]), r"scale_FC is bfloat16\[3, 2\]"),
        ((x_TD, packed_FB, scale_FC.astype(jnp.float32)), "scale_FC is float32"),
    ):
        with pytest.raises(ValueError, match=message):
            op.int4_matmul(*operands, backend="reference")
    with pytest.raises(ValueError, match="unknown int4_matmul backend 'gpu'"):
        op.int4_matmul(x_TD, packed_FB, scale_FC, backend="gpu")


@needs_kernels
def test_auto_takes_the_kernels_on_a_cpu_only():
    x_TD, packed_FB, scale_FC = jnp.zeros((2, 64)), jnp.zeros((4, 32), jnp.uint8), jnp.zeros((4, 2), jnp.bfloat16)
    assert op.choose_backend("auto", "cpu") == op.choose_backend("auto", "cpu", x_TD, packed_FB, scale_FC) == "cpu"
    assert op.choose_backend("auto", "tpu", x_TD, packed_FB, scale_FC) == "reference"
    half = x_TD.astype(jnp.float16)
    assert op.choose_backend("auto", "cpu", half, packed_FB, scale_FC) == "reference"
    with pytest.raises(ValueError, match="x_TD is float16; accepted are bfloat16 and float32"):
        op.int4_matmul(half, packed_FB, scale_FC, backend="cpu")


@needs_kernels
@pytest.mark.parametrize(("dtype", "num_rows"), [("bfloat16", 1), ("bfloat16", 40), ("float32", 9), ("float32", 40)])
def test_a_stored_program_can_have_its_kernels_again(dtype, num_rows):
    operands = map(jnp.asarray, make_operands(Case("", num_rows, 64, 5, dtype)))
    program = jax.jit(lambda *operands: op.int4_matmul(*operands, backend="cpu")).lower(*operands).compile()
    names = calls_in(program.as_text())
    assert len(names) == (2 if dtype == "bfloat16" else 1)
    prepare(names)


@needs_kernels
@pytest.mark.parametrize(("dtype", "rows"), [("quads", "0"), ("float32", "33"), ("bfloat16", "1")])
def test_there_is_no_kernel_for_other_numbers_of_rows(dtype, rows):
    with pytest.raises(ValueError, match="there is no kernel for"):
        cpu.kernel(dtype, rows, machine=this_machine())
