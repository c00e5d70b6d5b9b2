"""Every backend of top_k_top_p against a sort in numpy float64, and the threshold search by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import top_k_top_p
from pallas_kernels.testing import QUICK_COMPILE, is_simulated
from pallas_kernels.top_k_top_p import gpu, xla
from pallas_kernels.top_k_top_p.cases import CASES, Case
from pallas_kernels.top_k_top_p.search import float_of_order, order_of_float

INTERPRET = {"reference": False, "xla": False, "tpu": pltpu.InterpretParams(), "gpu": is_simulated("gpu")}
V = 16


def make_logits(case: Case) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits_SV = 3 * rng.normal(size=(len(case.limits), case.vocabulary)).astype(np.float32)
    if case.kind == "tied":
        logits_SV = np.round(logits_SV)
    if case.kind == "masked":
        logits_SV[rng.random(logits_SV.shape) < 0.9] = -np.inf
        logits_SV[:, 0] = 0
    if case.kind == "peaked":
        logits_SV[:, case.vocabulary // 2] = 200
    if case.kind == "equal":
        logits_SV[:] = 1.5
    if case.kind == "wide":
        logits_SV = np.sign(logits_SV) * np.float32(10) ** rng.integers(-30, 30, logits_SV.shape).astype(np.float32)
        logits_SV[:, :2] = 0.0, -0.0
    return logits_SV


def may_stay(logits_V: np.ndarray, limits: tuple[int, float, float], slack: float) -> np.ndarray:
    """Which tokens stay, in float64; with slack, also those that miss a limit by a rounding error, or fewer."""
    top_k, top_p, min_p = limits
    logits_V = logits_V.astype(np.float64)
    sorted_V = np.sort(logits_V)[::-1]
    kth = sorted_V[top_k - 1] if 0 < top_k < len(logits_V) else -np.inf
    with np.errstate(divide="ignore"):
        floor = max(kth, sorted_V[0] + np.log(min_p) - slack)
    weight_V = np.where(logits_V >= floor, np.exp(logits_V - sorted_V[0]), 0)
    order_V = np.argsort(logits_V)[::-1]
    num_above_V = len(logits_V) - np.searchsorted(sorted_V[::-1], logits_V, side="right")
    above_V = np.append(0, np.cumsum(weight_V[order_V]))[num_above_V]
    stays_V = (above_V < top_p * weight_V.sum() * (1 + slack)) | (top_p >= 1)
    return stays_V & (logits_V >= floor) & np.isfinite(logits_V)


def least(backend: str, logits_SV: np.ndarray, limits, temperature: float = 1.0) -> np.ndarray:
    top_k_S, top_p_S, min_p_S = zip(*limits)
    limits_S = np.array(top_k_S, np.int32), np.array(top_p_S, np.float32), np.array(min_p_S, np.float32)
    temperature_S = np.full(len(limits), temperature, np.float32)
    return np.asarray(finder(backend, gpu.PIECE)(logits_SV, *limits_S, temperature_S))


@functools.cache
def finder(backend: str, _piece: int):
    find = functools.partial(top_k_top_p.least_logits, backend=backend, interpret=INTERPRET[backend])
    return jax.jit(find, compiler_options=QUICK_COMPILE)


@pytest.fixture
def small_pieces(monkeypatch):
    """The GPU cuts rows of any length into pieces, and not all that is in question has room."""
    for name, value in {"PIECE": 64, "ALONE": 64, "SLOTS": 16}.items():
        monkeypatch.setattr(gpu, name, value)


@pytest.mark.parametrize("backend", INTERPRET)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_tokens_that_stay_are_those_of_a_sort(case, backend, request):
    if backend == "gpu" and case.vocabulary < 1000:
        request.getfixturevalue("small_pieces")
    logits_SV = make_logits(case)
    least_S = least(backend, logits_SV, case.limits)
    for logits_V, limits, limit in zip(logits_SV, case.limits, least_S, strict=True):
        stays_V = (logits_V >= limit) & np.isfinite(logits_V)
        must_V, may_V = may_stay(logits_V, limits, -1e-5), may_stay(logits_V, limits, 1e-5)
        assert stays_V[must_V].all(), (limits, limit)
        assert may_V[stays_V].all(), (limits, limit)
        if limits[1:] == (1.0, 0.0):  # nothing rounds
            kth = np.sort(logits_V)[-limits[0]] if 0 < limits[0] < len(logits_V) else -np.inf
            assert limit == kth


def test_the_oracle_leaves_little_room():
    """A rounding error decides over a few tokens at most, of all that a row may draw."""
    for case in CASES:
        for logits_V, limits in zip(make_logits(case), case.limits, strict=True):
            must_V, may_V = may_stay(logits_V, limits, -1e-5), may_stay(logits_V, limits, 1e-5)
            assert len(set(logits_V[may_V & ~must_V])) <= 0.01 * len(logits_V), (case.name, limits)


@pytest.mark.parametrize("temperature", [0.3, 4.0])
@pytest.mark.parametrize("backend", INTERPRET)
def test_a_temperature_changes_probabilities_and_not_logits(backend, temperature, small_pieces):
    case = CASES[1]
    logits_SV = make_logits(case)
    least_S = least(backend, logits_SV, case.limits, temperature)
    for logits_V, limits, limit in zip(logits_SV, case.limits, least_S, strict=True):
        scaled_V = logits_V.astype(np.float64) / np.float32(temperature)
        must_V, may_V = may_stay(scaled_V, limits, -1e-5), may_stay(scaled_V, limits, 1e-5)
        assert (logits_V >= limit)[must_V].all(), (limits, limit)
        assert may_V[logits_V >= limit].all(), (limits, limit)


@pytest.mark.parametrize("backend", ["xla", "tpu", "gpu"])
def test_a_row_without_a_distribution_does_not_touch_its_neighbours(backend):
    case = CASES[1]
    logits_SV = make_logits(case)
    alone_S = least(backend, logits_SV, case.limits)
    logits_SV[1], logits_SV[3], logits_SV[5, 7], logits_SV[7, :2] = np.nan, -np.inf, np.nan, np.inf
    beside_S = least(backend, logits_SV, case.limits)
    fine = [row for row in range(len(case.limits)) if row not in (1, 3, 5, 7)]
    np.testing.assert_array_equal(beside_S[fine], alone_S[fine])


# ---- the search ----------------------------------------------------------------------------------

any_logit = st.floats(-30, 30, width=32)
threshold = jax.jit(xla.largest_threshold)


@given(
    hnp.arrays(np.float32, V, elements=any_logit | st.sampled_from([0.0, -0.0, 1.0, -np.inf, 3e38, -3e38])),
    st.integers(1, V),
)
def test_the_threshold_search_finds_the_kth_largest_of_any_floats(logits_V, k):
    found = threshold(jnp.asarray(logits_V)[None], jnp.ones((1, 1)), jnp.array([k], jnp.float32))
    assert found[0] == np.sort(logits_V)[-k]


def test_the_threshold_search_ends_at_the_infinities():
    logits_1V = jnp.arange(4.0)[None]
    find = lambda need: float(threshold(logits_1V, jnp.ones((1, 1)), jnp.array([need]))[0])
    assert find(5.0) == -np.inf
    assert find(0.0) == np.inf
    assert find(np.nan) == -np.inf


@given(hnp.arrays(np.float32, 2, elements=st.floats(width=32, allow_nan=False)))
def test_the_order_of_floats_is_the_order_of_their_numbers(pair):
    low, high = sorted(pair.tolist())
    assert order_of_float(low) <= order_of_float(high) or low == high
    back = np.asarray(float_of_order(jnp.array([order_of_float(low), order_of_float(high)], jnp.int32)))
    np.testing.assert_array_equal(back, np.array([low, high], np.float32))


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_SV": jnp.zeros((2, 8), jnp.bfloat16)}, r"logits_SV is bfloat16\[2, 8\]; accepted is float32\[S, V\]"),
        ({"top_k_S": jnp.zeros(2)}, r"top_k_S is float32\[2\]; accepted is int32\[2\]"),
        ({"top_p_S": jnp.zeros(3)}, r"top_p_S is float32\[3\]; accepted is float32\[2\]"),
        ({"min_p_S": jnp.zeros((2, 1))}, r"min_p_S is float32\[2, 1\]"),
        ({"backend": "sort"}, "unknown top_k_top_p backend 'sort'; known are"),
        ({"logits_SV": jax.ShapeDtypeStruct((2, 2**20), jnp.float32), "backend": "tpu"}, "accepted are up to 524288"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    good = {"logits_SV": jnp.zeros((2, 8)), "top_k_S": jnp.zeros(2, jnp.int32), "top_p_S": jnp.ones(2)}
    with pytest.raises(ValueError, match=message):
        top_k_top_p.least_logits(**{**good, "min_p_S": jnp.zeros(2), "backend": "xla"} | changes)


def test_auto_chooses_what_is_written_for_the_platform():
    assert [top_k_top_p.choose_backend("auto", platform) for platform in ("cpu", "tpu", "gpu")] == ["xla", "tpu", "gpu"]
    long = jax.ShapeDtypeStruct((2, 2**20), jnp.float32)
    assert top_k_top_p.choose_backend("auto", "tpu", long) == "xla"
