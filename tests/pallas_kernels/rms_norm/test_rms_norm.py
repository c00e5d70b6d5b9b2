"""Normalised rows against numpy in float64, on this CPU and as one with fewer instructions would compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm as op
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.rms_norm import How, cpu
from pallas_kernels.rms_norm.cases import CASES

needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)
HOW = [How(1e-5, is_offset, is_centred) for is_offset in (False, True) for is_centred in (False, True)]


def operands(case, dtype):
    rng = np.random.default_rng(0)
    x_TD = rng.normal(0.3, 1.0, (case.num_rows, case.num_columns)) * np.exp2(rng.integers(-9, 9, (case.num_rows, 1)))
    return jnp.asarray(x_TD, dtype), jnp.asarray(rng.normal(0, 1, case.num_columns), dtype)


def oracle(x_TD, weight_D, how):
    x, weight = (np.asarray(each, np.float64) for each in (x_TD, weight_D))
    x = x - how.is_centred * x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + how.eps) * (weight + how.is_offset)


def check(out_TD, x_TD, weight_D, how):
    assert (out_TD.dtype, out_TD.shape) == (x_TD.dtype, x_TD.shape)
    expected_TD = oracle(x_TD, weight_D, how)
    roundings = 1 if how.is_offset or x_TD.dtype == jnp.float32 else 2
    step = {"bfloat16": roundings * 2**-8, "float16": roundings * 2**-11, "float32": 4e-6}[str(x_TD.dtype)]
    bound = step * np.abs(expected_TD) + 1e-6
    assert (np.abs(np.asarray(out_TD, np.float64) - expected_TD) <= bound * 1.01).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_the_reference_is_what_it_says(how, dtype):
    check(op.rms_norm(*(args := operands(CASES[1], dtype)), how, backend="reference"), *args, how)


@needs_kernels
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_of_every_machine_normalise(case, dtype):
    for how in HOW:
        x_TD, weight_D = operands(case, dtype)
        for machine in {AVX2, this_machine()}:
            norm = jax.jit(lambda x, weight, how=how, machine=machine: cpu.rms_norm(x, weight, how, machine))
            check(norm(x_TD, weight_D), x_TD, weight_D, how)


@needs_kernels
def test_a_row_is_rounded_as_the_reference_does_and_knows_no_other():
    """Of one number the rest of the row takes, so that what is multiplied is known; and rows without numbers."""
    x_TD = jnp.ones((40, 32), jnp.bfloat16).at[::2].set(jnp.nan)
    weight_D = jnp.asarray(np.linspace(0.5, 3, 32), jnp.bfloat16)
    norm = jax.jit(lambda x: op.rms_norm(x, weight_D, How(0.0171), backend="cpu"))
    out_TD = np.asarray(norm(x_TD), np.float32)
    unit = jnp.asarray(1 / np.sqrt(1.0171), jnp.bfloat16)
    assert np.isnan(out_TD[::2]).all()
    np.testing.assert_array_equal(out_TD[1::2], np.tile(np.asarray(unit * weight_D, np.float32), (20, 1)))
    rng = np.random.default_rng(1)
    rows_TD = jnp.asarray(rng.normal(size=(33, 768)), jnp.bfloat16)
    norm = jax.jit(lambda x, weight: op.rms_norm(x, weight, How(1e-6), backend="cpu"))
    together_TD = np.asarray(norm(rows_TD, jnp.ones(768, jnp.bfloat16)), np.float32)
    alone_D = np.asarray(norm(rows_TD[32:], jnp.ones(768, jnp.bfloat16)), np.float32)[0]
    np.testing.assert_array_equal(together_TD[32], alone_D)


@needs_kernels
def test_stored_names_make_the_same_kernels_known_again():
    norm = jax.jit(lambda x, weight: op.rms_norm(x, weight, HOW[3], backend="cpu"))
    (name,) = calls_in(norm.lower(*operands(CASES[0], jnp.bfloat16)).compile().as_text())
    prepare([name])
    with pytest.raises(ValueError, match="no kernel for bfloat16, factory, taken"):
        prepare([name.replace("offsets", "factory")])


def test_other_operands_are_refused_by_name():
    x_TD, weight_D = operands(CASES[1], jnp.float32)
    narrow_TD, whole_TD = x_TD.astype(jnp.float16), x_TD.astype(jnp.int8)
    for wrong in ((x_TD, weight_D[1:]), (x_TD[0], weight_D), (narrow_TD, weight_D), (whole_TD, weight_D)):
        with pytest.raises(ValueError, match="accepted are rows and as long a weight, both bfloat16 or float16 or"):
            op.rms_norm(*wrong, HOW[0], backend="reference")
    if why_not() is None:
        with pytest.raises(ValueError, match="rows have 20 numbers; accepted are multiples of 16"):
            op.rms_norm(x_TD[:, :20], weight_D[:20], HOW[0], backend="cpu")
