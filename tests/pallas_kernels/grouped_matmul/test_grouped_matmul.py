"""Every backend of grouped_matmul against a product per expert in numpy float64, unused tokens and experts poisoned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import grouped_matmul as gm
from pallas_kernels.grouped_matmul import cpu
from pallas_kernels.grouped_matmul.cases import CASES, Case
from pallas_kernels.grouped_matmul.items import make_items
from pallas_kernels.llvm.calls import calls_in, prepare
from pallas_kernels.llvm.machine import Machine, this_machine, why_not
from pallas_kernels.testing import is_simulated, quantized_values, run_once, tolerance, unit_scales

INTERPRET = {"reference": False, "tpu": pltpu.InterpretParams(), "gpu": is_simulated("gpu"), "cpu": False}
needs_kernels = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
AVX2 = Machine("haswell", "+avx2,+fma", lanes=8, num_registers=16)  # what every x86 machine of ten years has


def make_operands(case: Case, poison: float = np.nan) -> tuple[np.ndarray, gm.ExpertWeights, np.ndarray]:
    """Tokens of unit size, weights that give unit outputs; `poison` for padding and for experts without tokens."""
    rng = np.random.default_rng(0)
    E, D, F = len(case.sizes), case.num_inputs, case.num_outputs
    x_TD = rng.normal(size=(sum(case.sizes) + case.padding, D)).astype(case.dtype)
    x_TD[sum(case.sizes) :] = poison
    sizes_E = np.array(case.sizes, np.int32)
    if not quantized(case):
        values_EFD = (rng.normal(size=(E, F, D)) / np.sqrt(D)).astype(case.weights)
        values_EFD[sizes_E == 0] = poison
        return x_TD, gm.ExpertWeights(values_EFD), sizes_E
    scale_ECF = unit_scales(rng, (E, D // (case.group or D), F), case.weights, D)
    scale_ECF[sizes_E == 0] = poison
    zero_ECF = rng.integers(-3, 4, scale_ECF.shape).astype(np.float32) if case.zeros else None
    scale_ECF /= 2 if case.zeros else 1
    scale_ECF = scale_ECF.astype(case.scales)
    return x_TD, gm.ExpertWeights(quantized_values(rng, (E, F, D), case.weights), scale_ECF, zero_ECF), sizes_E


def quantized(case: Case) -> bool:
    return case.weights not in ("bfloat16", "float32")


def expected(case: Case, x_TD: np.ndarray, weights: gm.ExpertWeights) -> np.ndarray:
    out_TF, start = np.zeros((len(x_TD), case.num_outputs)), 0
    for expert, size in enumerate(case.sizes):
        weight_FD = np.asarray(weights.values_EFD[expert], np.float64)
        if weights.scale_ECF is not None:
            scale_CF = np.asarray(weights.scale_ECF[expert], np.float64)
            zero_CF = np.zeros_like(scale_CF) if weights.zero_ECF is None else weights.zero_ECF[expert]
            of_inputs = (np.repeat(x_CF, case.num_inputs // len(scale_CF), axis=0).T for x_CF in (scale_CF, zero_CF))
            scale_FD, zero_FD = of_inputs
            weight_FD = (weight_FD - zero_FD) * scale_FD
        if size:
            out_TF[start : start + size] = np.asarray(x_TD[start : start + size], np.float64) @ weight_FD.T
        start += size
    return out_TF


def supported(backend: str, case: Case) -> bool:
    x_TD, weights, _ = make_operands(case)
    return gm.backends(backend, x_TD, weights)[backend] is None


PAIRS = [("reference", case) for case in CASES] + [
    (backend, case) for backend in ("tpu", "gpu", "cpu") for case in CASES if supported(backend, case)
]


def every_second_of_simulated():
    """Simulated kernels take every second case, each of the two the other ones."""
    for backend, case in PAIRS:
        is_left_out = CASES.index(case) % 2 == {"tpu": 0, "gpu": 1}.get(backend)
        marks = pytest.mark.exhaustive if is_left_out else ()
        yield pytest.param(backend, case, id=f"{backend}: {case.name}", marks=marks)


@pytest.mark.parametrize(("backend", "case"), list(every_second_of_simulated()))
def test_tokens_are_multiplied_by_their_own_expert_and_padding_gives_zeros(backend, case):
    x_TD, weights, sizes_E = make_operands(case)
    product = functools.partial(gm.grouped_matmul, backend=backend, interpret=INTERPRET[backend])
    out_TF = run_once(product, x_TD, weights, sizes_E)
    assert out_TF.dtype == x_TD.dtype
    difference_TF = np.abs(np.asarray(out_TF, np.float64) - expected(case, x_TD, weights))
    assert difference_TF.max() <= tolerance(case.dtype, case.num_inputs) * (3 if case.zeros else 1)
    assert not np.asarray(out_TF, np.float32)[sum(case.sizes) :].any()


GRADIENTS = (
    ("reference", Case("", "float32", (3, 0, 40, 1, 70), padding=5, num_inputs=24, num_outputs=17, dtype="float32")),
    ("gpu", Case("", "bfloat16", (3, 0, 40), padding=5, num_inputs=64, num_outputs=17)),
)


@pytest.mark.parametrize(("backend", "case"), GRADIENTS, ids=[backend for backend, _ in GRADIENTS])
def test_gradients_are_those_of_a_product_per_expert_and_padding_has_none(backend, case):
    x_TD, weights, sizes_E = make_operands(case)
    slope_TF = np.random.default_rng(1).normal(size=(len(x_TD), case.num_outputs)).astype(case.dtype)
    product = functools.partial(gm.grouped_matmul, backend=backend, interpret=INTERPRET[backend])

    def total(x_TD, values_EFD, sizes_E, slope_TF):
        return jnp.sum((product(x_TD, gm.ExpertWeights(values_EFD), sizes_E) * slope_TF).astype(jnp.float32))

    found = run_once(jax.grad(total, argnums=(0, 1)), x_TD, weights.values_EFD, sizes_E, slope_TF)
    wanted = np.zeros(x_TD.shape), np.zeros(weights.values_EFD.shape)
    ends = np.cumsum(sizes_E)
    for expert, own in enumerate(map(slice, ends - sizes_E, ends)):
        x, slope = (np.asarray(each[own], np.float64) for each in (x_TD, slope_TF))
        if len(x):
            wanted[0][own] = slope @ np.asarray(weights.values_EFD[expert], np.float64)
            wanted[1][expert] = slope.T @ x
    for each, right in zip(found, wanted, strict=True):
        assert np.abs(np.asarray(each, np.float64) - right).max() <= 4 * tolerance(case.dtype, case.num_inputs)


def test_kernels_take_weights_of_every_type():
    taken = {backend: {case.weights for name, case in PAIRS if name == backend} for backend in INTERPRET}
    assert taken["tpu"] == {"bfloat16", "float32", "int8", "float8_e4m3fn", "int4", "float4_e2m1fn"}
    assert taken["gpu"] == taken["tpu"] - {"float32"}
    assert taken["cpu"] == ({"bfloat16", "float32", "int8"} if why_not() is None else set())


@needs_kernels
@pytest.mark.parametrize("case", [case for name, case in PAIRS if name == "cpu"], ids=lambda case: case.name)
def test_a_lesser_cpu_computes_the_same_and_a_stored_program_can_have_its_kernel_again(case):
    x_TD, weights, sizes_E = make_operands(case)
    here = this_machine()
    plain = Machine(here.name, here.features.replace("+avx512bf16", "-avx512bf16"), here.lanes, here.num_registers)
    for machine in (plain, AVX2):
        out_TF = run_once(functools.partial(cpu.grouped_matmul, machine=machine), x_TD, weights, sizes_E)
        difference_TF = np.abs(np.asarray(out_TF, np.float64) - expected(case, x_TD, weights))
        assert difference_TF.max() <= tolerance(case.dtype, case.num_inputs)
        assert not np.asarray(out_TF, np.float32)[sum(case.sizes) :].any()
    product = jax.jit(functools.partial(gm.grouped_matmul, backend="cpu"))
    (name,) = calls_in(product.lower(x_TD, weights, sizes_E).compile().as_text())
    prepare([name])
    assert name.startswith(f"pallas_kernels.grouped_matmul.{case.weights}.")


@needs_kernels
def test_a_token_has_the_same_bits_in_any_company_on_a_cpu():
    case = Case("", "bfloat16", (17, 0, 5), num_inputs=133, num_outputs=70)
    x_TD, weights, sizes_E = make_operands(case)
    together = np.asarray(gm.grouped_matmul(x_TD, weights, jnp.asarray(sizes_E), backend="cpu"))
    for rows in ([0], [3, 7], [16], [2, 5, 1, 8, 9, 10, 11]):
        alone = gm.grouped_matmul(x_TD[rows], weights, jnp.array([len(rows), 0, 0], jnp.int32), backend="cpu")
        np.testing.assert_array_equal(together[rows], np.asarray(alone))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("case", CASES[1:14:3], ids=[case.name for case in CASES[1:14:3]])
def test_every_token_is_in_one_item_of_its_expert(case, aligned):
    T, tile = sum(case.sizes) + case.padding, 16
    make = functools.partial(make_items, num_tokens=T, tile=tile, aligned=aligned)
    items = jax.tree.map(np.asarray, run_once(make, np.array(case.sizes, np.int32)))
    found = np.full(T, -1)
    for item in range(len(items.expert_I)):
        first, start, end = items.first_I[item], items.start_I[item], items.end_I[item]
        mine = np.arange(max(first, start), min(first + tile, end))
        assert (found[mine] == -1).all()
        assert item < items.num_items[0] or not len(mine)
        assert not aligned or first % tile == 0
        found[mine] = items.expert_I[item]
    np.testing.assert_array_equal(found, np.repeat(np.arange(len(case.sizes) + 1), (*case.sizes, case.padding)))


# ---- bad input -----------------------------------------------------------------------------------

X_TD = jnp.zeros((4, 64), jnp.bfloat16)
SIZES_E = jnp.ones(2, jnp.int32)
FLOATS = gm.ExpertWeights(jnp.zeros((2, 8, 64), jnp.bfloat16))
INTEGERS_EFD = jnp.zeros((2, 8, 64), jnp.int8)


@pytest.mark.parametrize(
    ("x_TD", "weights", "sizes_E", "backend", "message"),
    [
        (X_TD[:, :9], FLOATS, SIZES_E, "reference", r"x_TD is bfloat16\[4, 9\]; accepted is .*\[T, 64\]"),
        (X_TD, FLOATS, SIZES_E[:1], "reference", r"group_sizes_E is int32\[1\]; accepted is int32\[2\]"),
        (X_TD, gm.ExpertWeights(INTEGERS_EFD), SIZES_E, "reference", r"values_EFD is int8.*accepted is bfloat16 or"),
        (X_TD, gm.ExpertWeights(FLOATS.values_EFD, jnp.ones((2, 1, 8))), SIZES_E, "reference", "accepted is int8 or"),
        (X_TD, gm.ExpertWeights(FLOATS.values_EFD, None, jnp.ones((2, 1, 8))), SIZES_E, "reference", "without scales"),
        (
            X_TD,
            gm.ExpertWeights(INTEGERS_EFD, jnp.ones((2, 2, 8)), jnp.ones((2, 1, 8))),
            SIZES_E,
            "reference",
            r"zero_ECF is float32\[2, 1, 8\]; accepted is float32\[2, 2, 8\]",
        ),
        (
            X_TD,
            gm.ExpertWeights(INTEGERS_EFD, jnp.ones((2, 3, 8))),
            SIZES_E,
            "reference",
            r"scale_ECF is .*C divides 64",
        ),
        (
            X_TD,
            gm.ExpertWeights(INTEGERS_EFD, jnp.ones((2, 1, 8))),
            SIZES_E,
            "tpu",
            "64 inputs in groups of 64; accepted are multiples of 128",
        ),
        (X_TD, gm.ExpertWeights(INTEGERS_EFD, jnp.ones((2, 4, 8))), SIZES_E, "gpu", "groups have 16 inputs; accepted"),
        (
            X_TD.astype("float32"),
            FLOATS,
            SIZES_E,
            "cpu",
            "x_TD is float32 and values_EFD bfloat16; accepted are float32",
        ),
        (X_TD, gm.ExpertWeights(INTEGERS_EFD, jnp.ones((2, 2, 8))), SIZES_E, "cpu", "scale_ECF has 2 groups of inputs"),
        (X_TD.astype("float32"), FLOATS, SIZES_E, "gpu", "x_TD is float32; accepted are bfloat16 and float16"),
        (X_TD, FLOATS, SIZES_E, "megablox", "unknown grouped_matmul backend 'megablox'"),
    ],
)
def test_bad_operands_are_refused(x_TD, weights, sizes_E, backend, message):
    with pytest.raises(ValueError, match=message):
        gm.grouped_matmul(x_TD, weights, sizes_E, backend=backend)


def test_auto_chooses_what_is_written_for_the_platform():
    x_TD, weights = jnp.zeros((4, 128), jnp.bfloat16), gm.ExpertWeights(jnp.zeros((2, 8, 128), jnp.bfloat16))
    chosen = [gm.choose_backend("auto", platform, x_TD, weights) for platform in ("cpu", "tpu", "gpu")]
    assert chosen == ["cpu" if why_not() is None else "reference", "tpu", "gpu"]
