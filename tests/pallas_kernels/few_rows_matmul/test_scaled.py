"""A GPU's products with weights of 8 and 4 bits against numpy in float64, interpreted where there is no GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows_matmul as op
from pallas_kernels.few_rows_matmul import gpu
from pallas_kernels.few_rows_matmul.gpu import Tiles
from pallas_kernels.few_rows_matmul.scaled import ScaledWeight
from pallas_kernels.testing import unit_scales

INTERPRETS = jax.default_backend() != "gpu"
NARROW, FOLDED = Tiles(32, 64), Tiles(16, 64, folds=2, warps=2, weight_first=True)
OF_GROUPS = 2.0**-8
"""How far a weight may be off, and its scale, where both are rounded to bfloat16."""


@dataclasses.dataclass(frozen=True)
class Case:
    """`group` 0: a scale for each output."""

    kind: str
    num_rows: int
    num_outputs: int
    num_inputs: int
    group: int = 0
    zeros: bool = False
    tiles: Tiles = NARROW
    scales: str = "float32"
    groups_first: bool = False


CASES = (
    Case("int8", 5, 70, 200),
    Case("int8", 3, 40, 256, tiles=FOLDED),
    Case("int8", 1, 70, 256, 32, True, FOLDED, "bfloat16"),
    Case("float8_e4m3fn", 17, 33, 256, 128),
    Case("float8_e4m3fn", 64, 32, 128, tiles=FOLDED),
    Case("uint8", 5, 70, 192, 32, scales="bfloat16"),
    Case("uint8", 2, 70, 256, 32, True, FOLDED, "bfloat16"),
    Case("uint8", 33, 40, 384, 128, True),
    Case("uint8", 8, 40, 320, 64, False, Tiles(16, 128, warps=2, weight_first=True)),
    Case("uint8", 9, 40, 96, 0, True, FOLDED),
    Case("int8", 9, 40, 256, tiles=dataclasses.replace(FOLDED, parts=2)),
    Case("uint8", 5, 40, 384, 32, False, dataclasses.replace(NARROW, parts=3)),
    Case("uint8", 5, 70, 256, 64, True, NARROW, groups_first=True),
    Case("uint8", 2, 40, 320, 32, False, dataclasses.replace(FOLDED, inputs=128), groups_first=True),
    Case("uint8", 9, 40, 128, 64, True, FOLDED, groups_first=True),
    Case("int8", 33, 40, 512, 128, True, FOLDED, "bfloat16", groups_first=True),
    Case("float8_e4m3fn", 3, 33, 384, 128, groups_first=True),
)


def make_weight(case: Case, *outputs: int) -> ScaledWeight:
    rng = np.random.default_rng(0)
    D, is_packed = case.num_inputs, case.kind == "uint8"
    C = D // (case.group or D)
    lowest, highest = (0, 15) if is_packed else (-128, 127)
    values = rng.integers(lowest, highest + 1, (*outputs, D))
    if case.kind == "float8_e4m3fn":
        values = rng.normal(scale=60, size=(*outputs, D)).astype(np.float32)
        values.flat[:6] = 448, -448, 2**-9, -(2**-9), 0, -0.0
    values = packed(values) if is_packed else values.astype(case.kind)
    scales = unit_scales(rng, (*outputs, C), "int4" if is_packed else case.kind, D).astype(case.scales)
    zeros = rng.integers(lowest // 8, highest + 1 if is_packed else 16, (*outputs, C)).astype(jnp.bfloat16)
    if case.groups_first:
        scales, zeros = np.moveaxis(scales, -1, 0), np.moveaxis(zeros, -1, 0).astype(np.float32)
    weight = ScaledWeight(values, scales, zeros if case.zeros else None, case.groups_first)
    return jax.tree.map(jnp.asarray, weight)


def packed(values: np.ndarray) -> np.ndarray:
    """Two to a byte: one of the first half of 32 inputs, and the one 16 inputs later."""
    groups = values.astype(np.uint8).reshape(*values.shape[:-1], -1, 32)
    return (groups[..., :16] | (groups[..., 16:] << 4)).reshape(*values.shape[:-1], -1)


def in_float64(weight: ScaledWeight) -> np.ndarray:
    *outputs, D = weight.shape
    values = np.asarray(weight.values)
    if weight.is_packed:
        groups = values.reshape(*outputs, -1, 16)
        values = np.concatenate([groups & 15, groups >> 4], axis=-1)
    groups_last = lambda x: np.moveaxis(np.asarray(x, np.float64), 0 if weight.groups_first else -1, -1)[..., None]
    values = values.astype(np.float64).reshape(*outputs, weight.num_groups, -1)
    zeros = 8 * weight.is_packed if weight.zeros is None else groups_last(weight.zeros)
    return ((values - zeros) * groups_last(weight.scales)).reshape(*outputs, D)


def make_rows(case: Case) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(case.num_rows, case.num_inputs)).astype(jnp.bfloat16)


def check(case: Case, found: jax.Array, expected: np.ndarray, sizes: np.ndarray) -> None:
    """Sums of pieces are scaled as they are; values get scales in bfloat16 where pieces have several groups."""
    within_group = case.group == 0 or case.group % case.tiles.inputs == 0
    np.testing.assert_array_less(np.abs(np.asarray(found) - expected), (1e-6 if within_group else OF_GROUPS) * sizes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_with_the_dequantised_weight(case):
    x_TD, weight = make_rows(case), make_weight(case, case.num_outputs)
    weight_FD, x64_TD = in_float64(weight), np.asarray(x_TD, np.float64)
    expected_TF, sizes_TF = x64_TD @ weight_FD.T, np.abs(x64_TD) @ np.abs(weight_FD).T + 1e-30
    found_TF = gpu.product(jnp.asarray(x_TD), weight, jnp.float32, case.tiles, interpret=INTERPRETS)
    check(case, found_TF, expected_TF, sizes_TF)
    reference_TF = op.few_rows_matmul(jnp.asarray(x_TD), weight, backend="reference")
    np.testing.assert_array_less(np.abs(np.asarray(reference_TF) - expected_TF), 1e-6 * sizes_TF)


@pytest.mark.parametrize("case", [CASES[2], CASES[11], CASES[13]], ids=str)
def test_a_gate_and_what_is_added_are_of_scaled_sums(case):
    x_TD, weight = make_rows(case), make_weight(case, case.num_outputs, 2)
    gate_TF, up_TF = np.einsum("td,fgd->gtf", np.asarray(x_TD, np.float64), in_float64(weight))
    found_TF = gpu.product(jnp.asarray(x_TD), weight, jnp.float32, case.tiles, interpret=INTERPRETS)
    np.testing.assert_allclose(found_TF, gate_TF / (1 + np.exp(-gate_TF)) * up_TF, rtol=0.02, atol=0.02)
    added_TF = 1000 * np.random.default_rng(2).normal(size=gate_TF.shape).astype(np.float32)
    gates = jax.tree.map(lambda x: x[:, 0], dataclasses.replace(weight, scales=None, zeros=None))
    of_gates = (lambda x: x[:, :, 0]) if case.groups_first else (lambda x: x[:, 0])
    scales, zeros = jax.tree.map(of_gates, (weight.scales, weight.zeros))
    gates = dataclasses.replace(gates, scales=scales, zeros=zeros)
    sums_TF = gpu.added_product(jnp.asarray(x_TD), gates, jnp.asarray(added_TF), case.tiles, interpret=INTERPRETS)
    np.testing.assert_allclose(sums_TF - added_TF, gate_TF, atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"values": jnp.zeros((4, 64), jnp.int16)},
            r"values is int16\[4, 64\]; accepted are int8, float8_e4m3fn, uint8",
        ),
        ({"values": jnp.zeros((4, 24), jnp.uint8)}, "accepted is a multiple of 16 bytes an output"),
        ({"scales": jnp.zeros((4, 3))}, r"scales is float32\[4, 3\]; .* where C divides 64 inputs"),
        ({"scales": jnp.zeros((5, 2))}, r"scales is float32\[5, 2\]"),
        ({"groups_first": True}, r"scales is float32\[4, 2\]; .*\['C', 4\] where C divides 64 inputs"),
        ({"zeros": jnp.zeros((4, 2), jnp.int32)}, r"zeros is int32\[4, 2\]; accepted is float32 or bfloat16"),
        ({"zeros": jnp.zeros((4, 1), jnp.bfloat16)}, r"zeros is bfloat16\[4, 1\]"),
    ],
)
def test_what_is_no_weight_is_refused(change, message):
    weight = ScaledWeight(jnp.zeros((4, 64), jnp.int8), jnp.zeros((4, 2)))
    with pytest.raises(ValueError, match=message):
        op.few_rows_matmul(jnp.zeros((1, 64), jnp.bfloat16), dataclasses.replace(weight, **change), backend="reference")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_of_another_type_are_refused(dtype):
    weight = ScaledWeight(jnp.zeros((4, 64), jnp.int8), jnp.zeros((4, 2)))
    message = rf"x_TD is {dtype}\[1, 64\]; accepted are bfloat16\[rows, inputs\] and int8\["
    with pytest.raises(ValueError, match=message):
        op.few_rows_matmul(jnp.zeros((1, 64), dtype), weight, backend="reference")


def test_a_gpu_has_tiles_for_weights_of_checkpoints_of_every_size(monkeypatch):
    monkeypatch.setattr(gpu, "tuned", lambda: {})
    weight = make_weight(Case("uint8", 1, 40, 96, 32, groups_first=True), 40)
    refused = lambda rows: op.backends("gpu", jnp.zeros((rows, 96), jnp.bfloat16), weight)["gpu"]
    assert refused(1) is refused(17) is refused(64) is None
    assert "65 rows, 40 x 96, 4 bits is faster" in refused(65)
    assert gpu.default_tiles(8, 28672, 4096, True, is_gated=True) == Tiles(32, 256, 1, 4, 4, True)
    assert [gpu.default_tiles(8, 4096, 256 * n, True).parts for n in (16, 14, 43)] == [4, 2, 1]
    assert gpu.default_tiles(33, 1 << 16, 4096, False) == Tiles(128, 128, stages=3)


def test_a_gpu_takes_weights_that_it_has_tiles_for(monkeypatch):
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(gpu, "tuned", lambda: {f"{kind}, 8 rows, 40 x 96, 4 bits": NARROW})
    x_TD, int4 = jnp.zeros((5, 96), jnp.bfloat16), make_weight(Case("uint8", 5, 40, 96, 32), 40)
    refused = lambda weight: op.backends("gpu", x_TD, weight)["gpu"]
    assert refused(int4) is None
    assert "5 rows, 40 x 96, 8 bits is faster" in refused(make_weight(Case("int8", 5, 40, 96), 40))
    assert "groups have 48 inputs; accepted are powers of two" in refused(make_weight(Case("int8", 5, 40, 96, 48), 40))
    old = "values are float8_e4m3fn, which NVIDIA A100-SXM4-80GB lacks"
    monkeypatch.setattr(gpu, "device_kind", lambda interpret: "NVIDIA A100-SXM4-80GB")
    assert refused(make_weight(Case("float8_e4m3fn", 5, 40, 96), 40)) == old
    assert refused(jnp.zeros((40, 96), jnp.int8)).endswith("accepted is bfloat16")
