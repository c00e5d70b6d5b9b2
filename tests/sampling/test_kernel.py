"""The sampler with the kernels of TPUs and GPUs for limits, simulated: the draws are those of the candidates' way."""

import functools

import jax
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.sampling.limits import LimitsMethod, choose_method
from jaxpaged.sampling.rows import SamplingRows
from jaxpaged.sampling.sampler import sample_plain
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels.top_k import choose_backend
from tests.sampling.programs import Request, pack, padded, sample_plainly

V = 37
LOGITS = np.random.default_rng(7).normal(size=(12, V)).astype(np.float32) * 2
LIMITS = (
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 20},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.99},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0},
    {"temperature": 0.4, "top_p": 0.95},
    {"temperature": 2.0, "top_k": 30},
)
REQUESTS = [Request(SamplingParams(seed=11 + i, **limits), prompt=[0] * i) for i, limits in enumerate(LIMITS)]


SIMULATED = pytest.mark.parametrize("simulated", ["tpu", "gpu"])


@functools.cache
def kernel_program(simulated, num_devices=1):
    method = choose_method("cpu", make_mesh(num_devices), V, simulated=simulated)
    assert method.kernel == f"{simulated}-interpret"
    return jax.jit(functools.partial(sample_plain, method=method))


def draw(simulated, logits_SV, requests, bucket, num_devices=1):
    table = SamplingRows(16)
    for row, request in enumerate(requests):
        table.set(row, request.params)
    packed = pack(table, range(len(requests)), requests, bucket)
    return kernel_program(simulated, num_devices)(padded(logits_SV, bucket), packed).tokens_S[: len(requests)].tolist()


@SIMULATED
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_kernel_draws_what_candidates_draw_for_every_limit_in_any_company(simulated, num_devices):
    expected = [
        int(sample_plainly(LOGITS[line : line + 1], [request]).tokens_S[0]) for line, request in enumerate(REQUESTS)
    ]
    assert len(set(expected)) > 5
    assert draw(simulated, LOGITS, REQUESTS, 14, num_devices) == expected  # a number that nothing divides
    assert draw(simulated, LOGITS[::-1], REQUESTS[::-1], 14, num_devices) == expected[::-1]
    for line in (4, 8):
        assert draw(simulated, LOGITS[line : line + 1], [REQUESTS[line]], 2, num_devices) == [expected[line]]


@SIMULATED
def test_a_row_without_a_distribution_is_reported_and_harms_no_other(simulated):
    broken = LOGITS.copy()
    broken[5, 3], broken[8] = np.nan, -np.inf
    seen, clean = (draw(simulated, logits_SV, REQUESTS, 14) for logits_SV in (broken, LOGITS))
    assert [seen[5], seen[8]] == [0, 0]
    assert [token for i, token in enumerate(seen) if i not in (5, 8)] == [
        token for i, token in enumerate(clean) if i not in (5, 8)
    ]


def test_tpus_and_gpus_have_a_kernel_each_for_vocabularies_that_it_takes():
    mesh = make_mesh(1)
    assert choose_method("tpu", mesh, 128_256) == LimitsMethod("tpu", mesh)
    assert choose_method("gpu", mesh, 2**20) == LimitsMethod("gpu", mesh)
    assert choose_method("tpu", mesh, 2**20) == LimitsMethod()


def test_a_cpu_finds_candidates_with_its_own_kernel_where_there_is_one_device():
    largest = choose_backend("auto", "cpu")
    assert choose_method("cpu", make_mesh(1), V) == LimitsMethod(largest=largest)
    assert choose_method("cpu", make_mesh(2), V) == LimitsMethod()
