"""Every backend of quantized_matmul against products in numpy float64."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import quantized_matmul as qm
from pallas_kernels.quantized_matmul import gpu, tpu
from pallas_kernels.quantized_matmul.cases import CASES, Case
from pallas_kernels.testing import is_simulated, quantized_values, run_once, tolerance, unit_scales
from tests.pallas_kernels.few_rows_matmul.test_scaled import packed

INTERPRET = {"reference": False, "tpu": pltpu.InterpretParams(), "gpu": is_simulated("gpu")}


def make_operands(case: Case) -> tuple[np.ndarray, qm.QuantizedWeight]:
    """Tokens of unit size, and a weight that gives outputs of unit size."""
    rng = np.random.default_rng(0)
    T, D, F = case.num_tokens, case.num_inputs, case.num_outputs
    C = D // (case.group or D)
    scale_CF = unit_scales(rng, (C, F), case.weights, D) / (2 if case.zeros else 1)
    zero_CF = rng.integers(-3, 4, (C, F)).astype(np.float32) if case.zeros else None
    values_FD = quantized_values(rng, (F, D), case.weights)
    weight = qm.QuantizedWeight(values_FD, scale_CF.astype(case.scales), zero_CF)
    return rng.normal(size=(T, D)).astype(case.dtype), weight


def expected(case: Case, x_TD: np.ndarray, weight: qm.QuantizedWeight) -> np.ndarray:
    x_TD = np.asarray(x_TD, np.float64)
    if case.activations:
        largest = {"int8": 127, "float8_e4m3fn": 448}[case.activations]
        scale_T1 = np.abs(x_TD).max(1, keepdims=True) / largest
        scaled_TD = (x_TD / scale_T1).astype(np.float32)
        rounded_TD = np.round(scaled_TD) if case.activations == "int8" else scaled_TD.astype(jnp.float8_e4m3fn)
        x_TD = rounded_TD.astype(np.float64) * scale_T1
    group = case.num_inputs // weight.scale_CF.shape[0]
    scale_FD, zero_FD = (
        np.repeat(np.asarray(x_CF, np.float64), group, axis=0).T
        for x_CF in (weight.scale_CF, weight.zero_CF if case.zeros else np.zeros_like(weight.scale_CF))
    )
    return x_TD @ ((np.asarray(weight.values_FD, np.float64) - zero_FD) * scale_FD).T


def supported(backend: str, case: Case) -> bool:
    return (
        case.activations is None and qm.backends(backend, *jax.eval_shape(lambda: make_operands(case)))[backend] is None
    )


PAIRS = [("reference", case) for case in CASES] + [
    (backend, case) for backend in ("tpu", "gpu") for case in CASES if supported(backend, case)
]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=[f"{backend}: {case.name}" for backend, case in PAIRS])
def test_a_case_equals_the_product_with_the_dequantised_weight(backend, case):
    x_TD, weight = make_operands(case)
    product = functools.partial(
        qm.quantized_matmul, activations=case.activations, backend=backend, interpret=INTERPRET[backend]
    )
    out_TF = run_once(product, x_TD, weight)
    assert out_TF.dtype == x_TD.dtype
    difference = np.abs(np.asarray(out_TF, np.float64) - expected(case, x_TD, weight)).max()
    # Outputs grow with zeros; and a CPU rounds to float8 by way of float16, so that ties may go the other way.
    assert difference <= tolerance(case.dtype, case.num_inputs) * (3 if case.zeros or case.activations else 1)


@pytest.mark.parametrize("backend", ["reference", "gpu"])
@pytest.mark.parametrize("name", ["w4a16 in groups with zeros", "w4a16 in small groups", "w4a16 in groups"])
def test_two_values_of_a_byte_are_those_of_int4(backend, name):
    (case,) = (case for case in CASES if case.name == name)
    x_TD, weight = make_operands(case)
    zero_CF = None if weight.zero_CF is None else weight.zero_CF + 8
    in_bytes = qm.QuantizedWeight(packed(weight.values_FD.astype(np.int8) + 8), weight.scale_CF, zero_CF)
    assert qm.backends("tpu", x_TD, in_bytes)["tpu"] == "values_FD is uint8; accepted is int4"
    product = functools.partial(qm.quantized_matmul, backend=backend, interpret=INTERPRET[backend])
    found, wanted = (run_once(product, x_TD, each) for each in (in_bytes, weight))
    difference = np.abs(np.asarray(found, np.float64) - np.asarray(wanted, np.float64)).max()
    assert difference <= tolerance(case.dtype, case.num_inputs) * (3 if case.zeros else 1)


def test_kernels_take_group_wise_weights_of_every_type():
    taken = {backend: {case.weights for name, case in PAIRS if name == backend} for backend in INTERPRET}
    assert taken["tpu"] == taken["gpu"] == {"int8", "float8_e4m3fn", "int4", "float4_e2m1fn"}


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
def test_quantising_loses_half_a_step_at_most_and_zeros_stay_zeros(dtype):
    weight_FD = jax.random.normal(jax.random.key(0), (6, 64)).at[2].set(0.0)
    weight = qm.quantize(weight_FD, dtype, num_groups=4)
    found_FD = np.asarray(weight.values_FD, np.float64) * np.repeat(np.asarray(weight.scale_CF), 16, axis=0).T
    step_FD = np.repeat(np.asarray(weight.scale_CF), 16, axis=0).T
    if dtype == "float8_e4m3fn":
        step_FD = np.maximum(np.abs(np.asarray(weight_FD)) / 8, step_FD * 2.0**-9)
    assert (np.abs(found_FD - np.asarray(weight_FD)) <= step_FD / 2 + 1e-6).all()
    assert not found_FD[2].any()


def test_tiles_of_inputs_are_whole_groups_that_divide_the_inputs():
    assert tpu.inputs_per_tile(4096, 128) == 2048
    assert tpu.inputs_per_tile(640, 128) == 640
    assert tpu.inputs_per_tile(34 * 128, 128) == 2 * 128  # 17 groups would exceed a tile
    assert tpu.inputs_per_tile(3 * 4096, 4096) == 4096
    assert tpu.inputs_per_tile(14336, 32) == 2048
    assert tpu.inputs_per_tile(11008, 64) == 11008  # no eight groups together divide them


# ---- bad input -----------------------------------------------------------------------------------

X_TD = jnp.zeros((2, 64), jnp.bfloat16)
ONES_1F = jnp.ones((1, 8))
VALUES_FD = jnp.zeros((8, 64), jnp.int8)


@pytest.mark.parametrize(
    ("x_TD", "weight", "settings", "message"),
    [
        (X_TD[:, :32], (VALUES_FD, ONES_1F), {}, r"x_TD is bfloat16\[2, 32\]; accepted is .*\[T, 64\]"),
        (X_TD.astype(jnp.int8), (VALUES_FD, ONES_1F), {}, r"x_TD is int8\[2, 64\]"),
        (X_TD, (VALUES_FD.astype(jnp.int16), ONES_1F), {}, r"values_FD is int16\[8, 64\]; accepted is int8 or"),
        (X_TD[:, :48], (VALUES_FD[:, :24].astype(jnp.uint8), ONES_1F), {}, "accepted is a multiple of 16 bytes an"),
        (X_TD, (VALUES_FD, jnp.ones((3, 8))), {}, r"scale_CF is float32\[3, 8\]; accepted is float32 or .*\[C, 8\]"),
        (X_TD, (VALUES_FD, ONES_1F, jnp.ones((2, 8))), {}, r"zero_CF is float32\[2, 8\], scale_CF float32\[1, 8\]"),
        (X_TD, (VALUES_FD, ONES_1F), {"activations": "int4"}, "activations is int4; accepted is None or the weight's"),
        (X_TD, (VALUES_FD, jnp.ones((2, 8))), {"activations": "int8"}, "for a weight of 2 groups; accepted is one"),
        (X_TD, (VALUES_FD, ONES_1F), {"activations": "int8", "backend": "tpu"}, "XLA's own product"),
        (X_TD, (VALUES_FD, ONES_1F), {"backend": "gpu"}, "the weight has one group without zeros; accepted are more"),
        (
            X_TD,
            (VALUES_FD, jnp.ones((2, 8))),
            {"backend": "tpu"},
            "64 inputs in groups of 32; accepted are multiples of 128",
        ),
        (
            X_TD,
            (VALUES_FD, jnp.ones((4, 8))),
            {"backend": "gpu"},
            "groups have 16 inputs; accepted are multiples of 32",
        ),
        (X_TD.astype("float32"), (VALUES_FD, jnp.ones((2, 8))), {"backend": "gpu"}, "x_TD is float32; accepted are bf"),
        (X_TD, (VALUES_FD, ONES_1F), {"backend": "cublas"}, "unknown quantized_matmul backend 'cublas'"),
    ],
)
def test_bad_operands_are_refused(x_TD, weight, settings, message):
    with pytest.raises(ValueError, match=message):
        qm.quantized_matmul(x_TD, qm.QuantizedWeight(*weight), **{"backend": "reference"} | settings)


@pytest.mark.parametrize(("capability", "lacks"), [("8.0", True), ("8.6", True), ("8.9", False), ("12.0", False)])
def test_gpus_before_ada_refuse_float8(monkeypatch, capability, lacks):
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    weight = qm.QuantizedWeight(np.zeros((8, 64), jnp.float8_e4m3fn), np.ones((2, 8), np.float32))
    refusal = qm.backends("gpu", X_TD, weight)["gpu"]
    reason = "values_FD is float8_e4m3fn, which this GPU lacks; accepted are int8 and int4"
    assert refusal == (reason if lacks else None)
    assert not gpu.lacks_type(VALUES_FD)


def test_auto_takes_a_kernel_for_groups_only():
    grouped, channels = qm.QuantizedWeight(VALUES_FD, jnp.ones((2, 8))), qm.QuantizedWeight(VALUES_FD, ONES_1F)
    assert qm.choose_backend("auto", "gpu", X_TD, grouped) == "gpu"
    assert qm.choose_backend("auto", "gpu", X_TD, channels) == "reference"
    assert qm.choose_backend("auto", "cpu", X_TD, grouped) == "reference"
    with pytest.raises(ValueError, match="num_groups 3; accepted are"):
        qm.quantize(jnp.zeros((4, 16)), "int8", 3)
