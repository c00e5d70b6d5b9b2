"""A GPU's products of few rows against numpy in float64, in Pallas's interpreter where there is no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul import gpu
from pallas_kernels.few_rows_matmul.cases import CASES, Case
from tests.pallas_kernels.few_rows_matmul.products import check, make_operands

INTERPRETS = jax.default_backend() != "gpu"


@pytest.mark.parametrize(
    "tiles", [gpu.Tiles(32, 64), gpu.Tiles(16, 32, folds=2, weight_first=True)], ids=["rows first", "weight first"]
)
def test_the_kernel_computes_the_cases_of_bfloat16(tiles):
    for case in CASES:
        if case.dtype == "bfloat16":
            x_TD, weight_FD = make_operands(case)
            sums_TF = gpu.product(jnp.asarray(x_TD), jnp.asarray(weight_FD), jnp.float32, tiles, interpret=INTERPRETS)
            check(case, sums_TF, x_TD, weight_FD)


@pytest.fixture
def tuned(monkeypatch):
    """Tiles for this machine's kind of device, whose kernels are interpreted where that is no GPU."""
    tiles = {
        "16 rows, 67 x 133": gpu.Tiles(32, 64),
        "16 rows, 80 x 132, gated": gpu.Tiles(8, 64, folds=4, weight_first=True),
    }
    monkeypatch.setattr(gpu, "tuned", lambda: {f"{jax.devices()[0].device_kind}, {key}": x for key, x in tiles.items()})
    call = gpu.call
    monkeypatch.setattr(gpu, "call", lambda *operands: call(*operands[:-1], INTERPRETS))


def test_a_gpu_takes_what_it_has_tiles_for(tuned):
    case = Case("", 9, 133, 67)
    x_TD, weight_FD = make_operands(case)
    check(case, op.few_rows_matmul(jnp.asarray(x_TD), jnp.asarray(weight_FD), backend="gpu"), x_TD, weight_FD)
    assert op.adds("gpu", x_TD, weight_FD) and not op.adds("reference", x_TD, weight_FD)
    added_TF = np.linspace(-1000, 1000, 9 * 67, dtype=np.float32).reshape(9, 67)
    sums_TF = op.added_matmul(*map(jnp.asarray, (x_TD, weight_FD, added_TF)), backend="gpu")
    check(case, sums_TF - added_TF, x_TD, weight_FD)
    for rows, weight, message in (
        (8, weight_FD, "no tiles are known with which 8 rows, 67 x 133 is faster"),
        (257, weight_FD, "no tiles are known with which 257 rows, 67 x 133 is faster"),
        (9, weight_FD[:66], "no tiles are known with which 9 rows, 66 x 133 is faster"),
        (9, weight_FD.astype(np.int8), "the weight int8; accepted is bfloat16"),
    ):
        assert message in op.backends("gpu", jax.ShapeDtypeStruct((rows, 133), jnp.bfloat16), weight)["gpu"]


def test_a_gate_is_applied_to_sums_that_nobody_has_rounded(tuned):
    rng = np.random.default_rng(0)
    x_TD, weight_F2D = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in ((9, 132), (40, 2, 132)))
    assert op.gates("gpu", x_TD, weight_F2D)
    assert not op.gates("gpu", x_TD[:8], weight_F2D) and not op.gates("reference", x_TD, weight_F2D)
    assert not op.gates("gpu", x_TD, weight_F2D.astype(np.float32))
    gated_TF = op.gated_matmul(jnp.asarray(x_TD), jnp.asarray(weight_F2D), backend="gpu")
    gate_TF, up_TF = np.einsum("td,fgd->gtf", *(x.astype(np.float64) for x in (x_TD, weight_F2D)))
    expected_TF = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    assert gated_TF.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(gated_TF, np.float64), expected_TF, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("poisoned", ["rows", "outputs"])
def test_a_gpu_sums_nothing_that_is_not_of_the_row_and_of_the_output(poisoned):
    """NaN in a row or in an output's weights is in no other row or output; inputs end within a piece."""
    x_TD, weight_FD = make_operands(Case("", 5, 70, 20))
    (x_TD[3:4] if poisoned == "rows" else weight_FD[7:8])[:] = np.nan
    sums_TF = gpu.product(
        jnp.asarray(x_TD), jnp.asarray(weight_FD), jnp.float32, gpu.Tiles(16, 32), interpret=INTERPRETS
    )
    expected_TF = x_TD.astype(np.float64) @ weight_FD.astype(np.float64).T
    np.testing.assert_allclose(sums_TF, expected_TF, rtol=1e-3, atol=1e-3)
