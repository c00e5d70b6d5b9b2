"""Every backend of lora_matmul against a product for each token in numpy float64, slots that no token has poisoned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import lora_matmul as op
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.lora_matmul import cpu
from pallas_kernels.lora_matmul.cases import CASES, Case
from pallas_kernels.testing import is_simulated, run_once, tolerance

INTERPRET = {"reference": False, "gpu": is_simulated("gpu"), "cpu": False}
needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)


def operands_of(case: Case, poison: float = np.nan) -> tuple[np.ndarray, ...]:
    """Tokens of unit size, and factors that give unit outputs."""
    rng = np.random.default_rng(0)
    S, r, I, O = case.num_slots, case.num_ranks, case.num_inputs, case.num_outputs
    x_TI = rng.normal(size=(len(case.slots), I)).astype(case.dtype)
    a_SrI = (rng.normal(size=(S, r, I)) / np.sqrt(I)).astype(case.dtype)
    b_SrO = (rng.normal(size=(S, r, O)) / np.sqrt(r)).astype(case.dtype)
    unused = [slot for slot in range(S) if slot not in case.slots]
    a_SrI[unused] = b_SrO[unused] = poison
    base_TO = rng.normal(size=(len(case.slots), O)).astype(case.dtype)
    return x_TI, a_SrI, b_SrO, np.array(case.slots, np.int32), base_TO


def expected(x_TI, a_SrI, b_SrO, slot_T, base_TO) -> np.ndarray:
    x_TI, a_SrI, b_SrO, base_TO = (np.asarray(x, np.float64) for x in (x_TI, a_SrI, b_SrO, base_TO))
    added = lambda x_I, slot: x_I @ a_SrI[slot].T @ b_SrO[slot] if slot >= 0 else 0
    rows = [base_O + added(x_I, slot) for x_I, slot, base_O in zip(x_TI, slot_T, base_TO)]
    return np.stack(rows)


def check(case: Case, out_TO, operands) -> None:
    difference_TO = np.abs(np.asarray(out_TO, np.float64) - expected(*operands))
    assert difference_TO.max() <= 2 * tolerance(case.dtype, case.num_inputs)
    none = np.array(case.slots) < 0
    np.testing.assert_array_equal(np.asarray(out_TO)[none], operands[-1][none])


PAIRS = [
    (backend, case)
    for backend in INTERPRET
    for case in CASES
    if op.backends(backend, *operands_of(case)[:2])[backend] is None
]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{backend}: {case.name}" for backend, case in PAIRS])
def test_each_token_gets_what_its_own_slot_adds(backend, case):
    operands = operands_of(case, 0 if backend == "reference" else np.nan)
    product = functools.partial(op.lora_matmul, dtype=case.dtype, backend=backend, interpret=INTERPRET[backend])
    out_TO = run_once(product, *operands)
    assert out_TO.dtype == case.dtype
    check(case, out_TO, operands)


@needs_kernels
def test_kernels_of_every_machine_add_in_every_type_and_are_found_again():
    here = this_machine()
    plain = Machine(here.name, here.features.replace("+avx512bf16", "-avx512bf16"), here.lanes, here.num_registers)
    for case in CASES[1:4]:
        operands = operands_of(case)
        for machine in (here, plain, AVX2):
            out_TO = run_once(
                functools.partial(cpu.lora_matmul, dtype=jnp.dtype("float32"), machine=machine), *operands
            )
            assert out_TO.dtype == jnp.float32
            check(case, out_TO, operands)
    product = jax.jit(functools.partial(op.lora_matmul, dtype=jnp.bfloat16, backend="cpu"))
    (name,) = calls_in(product.lower(*operands).compile().as_text())
    prepare([name])
    with pytest.raises(
        ValueError, match="no kernel for bfloat16, bfloat16, 3 tokens; there are for bfloat16 and float32"
    ):
        prepare([name.replace(".4.", ".3.")])


@needs_kernels
def test_a_token_has_the_same_bits_in_any_company_on_a_cpu():
    case = CASES[3]
    x_TI, a_SrI, b_SrO, slot_T, base_TO = map(jnp.asarray, operands_of(case))
    product = functools.partial(op.lora_matmul, dtype=jnp.float32, backend="cpu")
    together = np.asarray(product(x_TI, a_SrI, b_SrO, slot_T, base_TO))
    for rows in (jnp.array([0]), jnp.array([13, 7]), jnp.array([*range(2, 24)])):
        alone = product(x_TI[rows], a_SrI, b_SrO, slot_T[rows], base_TO[rows])
        np.testing.assert_array_equal(together[rows], np.asarray(alone))


def test_other_operands_are_refused_by_name():
    x_TI, a_SrI, b_SrO, slot_T, base_TO = operands_of(CASES[1])
    many = np.zeros((65, 96), x_TI.dtype)
    for change, message in (
        (
            (x_TI, a_SrI[:, :3], b_SrO, slot_T, base_TO),
            r"a_SrI is bfloat16\[6, 3, 96\]; accepted is bfloat16\[6, 16, 96\]",
        ),
        ((x_TI, a_SrI, b_SrO.astype("float32"), slot_T, base_TO), r"b_SrO is float32"),
        ((x_TI, a_SrI, b_SrO, slot_T[1:], base_TO), r"slot_T is int32\[4\]; accepted is int32\[5\]"),
        ((x_TI.astype("int8"), a_SrI, b_SrO, slot_T, base_TO), "x_TI is int8"),
    ):
        with pytest.raises(ValueError, match=message):
            op.lora_matmul(*change, dtype="float32", backend="reference")
    assert op.backends("gpu", many, a_SrI)["gpu"] == "x_TI has 65 rows; accepted are up to 64"
    assert op.choose_backend("auto", "gpu", x_TI, a_SrI) == "gpu"
    assert op.choose_backend("auto", "tpu", x_TI, a_SrI) == "reference"
    wide = np.zeros((1, 2000, 96), x_TI.dtype)
    assert why_not() or op.backends("cpu", x_TI, wide)["cpu"] == "a_SrI has 2000 ranks; accepted are 1024"
