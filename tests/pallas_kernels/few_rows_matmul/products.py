"""Operands of the cases, and their products in float64."""

import jax
import numpy as np

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul.cases import Case
from pallas_kernels.testing import tolerance


def make_operands(case: Case) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    dims = (case.num_rows, case.num_inputs), (case.num_outputs, case.num_inputs)
    if case.dtype == "int8":
        return tuple(rng.integers(-128, 128, shape).astype(np.int8) for shape in dims)
    if case.dtype == "int16":
        most = op.most_of_int16(case.num_inputs)
        x_TD, weight_FD = rng.integers(-most, most + 1, dims[0]), rng.integers(-128, 128, dims[1])
        x_TD[-1], weight_FD[-1] = most, -128  # the largest sum that may come
        return x_TD.astype(np.int16), weight_FD.astype(np.int8)
    return tuple(rng.normal(size=shape).astype(case.dtype) for shape in dims)


def check(case: Case, sums_TF: jax.Array, x_TD: np.ndarray, weight_FD: np.ndarray) -> None:
    expected = x_TD.astype(np.float64) @ weight_FD.astype(np.float64).T
    assert sums_TF.dtype == op.SUMS[case.dtype] and sums_TF.shape == expected.shape
    sizes_TF = np.abs(x_TD.astype(np.float64)) @ np.abs(weight_FD.astype(np.float64)).T
    bound = 0 if case.dtype == "int8" else tolerance(np.float32, case.num_inputs)
    assert np.all(np.abs(np.asarray(sums_TF, np.float64) - expected) <= bound * sizes_TF)
