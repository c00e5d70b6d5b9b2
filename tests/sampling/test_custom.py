"""Custom logits processors: loading, refusing, and applying to the right rows only."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.errors import ConfigError, RequestError
from jaxpaged.sampling.custom import MAX_CUSTOM, load_processors
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.sampling_params.features import features_of
from tests.sampling.programs import Engine, Request, vector_of

V = 37
LOGITS = np.random.default_rng(9).normal(size=(3, V)).astype(np.float32)


class BanBelow:
    num_params = 1

    def params_of(self, params):
        wanted = (params.extra_args or {}).get("ban_below")
        return None if wanted is None else [float(wanted)]

    def apply(self, logits_V, params_P):
        return jnp.where(jnp.arange(len(logits_V)) < params_P[0], -jnp.inf, logits_V)


class Affine:
    num_params = 2

    def params_of(self, params):
        return (params.extra_args or {}).get("affine")

    def apply(self, logits_V, params_P):
        return logits_V * params_P[0] + params_P[1]


class DoubleAlways:
    """Without numbers a processor may still concern every request."""

    num_params = 0

    def params_of(self, params):
        return []

    def apply(self, logits_V, params_P):
        return logits_V * 2


def greedy(**extra_args) -> SamplingParams:
    return SamplingParams(seed=0, temperature=0, logprobs=0, logit_bias={3: 1.0}, extra_args=extra_args)


def processed(specs: list, requests: list[Request]) -> list[np.ndarray]:
    engine = Engine(V, load_processors(specs))
    for row, request in enumerate(requests):
        engine.add(row, request)
    output = engine.sample(LOGITS, range(len(requests)), requests)
    return [vector_of(output, line) for line in range(len(requests))]


def test_processors_change_the_requests_that_they_concern_in_their_order():
    requests = [Request(greedy(affine=[2.0, 1.0], ban_below=5)), Request(greedy(affine=[3.0, 0.0])), Request(greedy())]
    both, one, none = processed([BanBelow, Affine, DoubleAlways], requests)
    biased_SV = LOGITS.copy()
    biased_SV[:, 3] += 1  # custom processors come after the bias
    assert (both[:5] == -np.inf).all()
    np.testing.assert_allclose(both[5:], (biased_SV[0, 5:] * 2 + 1) * 2, rtol=1e-6)
    np.testing.assert_allclose(one, biased_SV[1] * 3 * 2, rtol=1e-6)
    np.testing.assert_array_equal(none, biased_SV[2] * 2)


def test_a_request_that_a_processor_concerns_needs_the_full_program():
    custom, concerned = load_processors([BanBelow]), SamplingParams(seed=0, extra_args={"ban_below": 1})
    assert not features_of(concerned) and custom.of(concerned)[0]
    assert not custom.of(SamplingParams(seed=0))[0]


def test_processors_are_found_by_module_and_class():
    assert load_processors(["tests.sampling.test_custom:BanBelow", Affine]).num_params == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no.such.module:Thing", "cannot be imported"),
        ("jaxpaged.errors:Nothing", "cannot be imported"),
        ("BanBelow", "Write 'module:Class'"),
        (":BanBelow", "Write 'module:Class'"),
        ("jaxpaged.errors:did_you_mean", "is no class"),
        (BanBelow(), "is no class"),
        (object, "has no num_params, params_of, apply"),
        (type("NeedsMore", (BanBelow,), {"__init__": lambda self, more: None}), "could not be made"),
        (type("Negative", (BanBelow,), {"num_params": -1}), "num_params -1"),
    ],
)
def test_a_processor_that_cannot_be_loaded_is_a_config_error(spec, message):
    with pytest.raises(ConfigError, match=message):
        load_processors([spec])


def test_there_is_a_limit_to_the_number_of_processors():
    load_processors([BanBelow] * MAX_CUSTOM)
    with pytest.raises(ConfigError, match=f"at most {MAX_CUSTOM}"):
        load_processors([BanBelow] * (MAX_CUSTOM + 1))


@pytest.mark.parametrize("numbers", [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")]])
def test_a_request_without_the_right_numbers_is_refused(numbers):
    with pytest.raises(RequestError, match="must make 2 finite numbers"):
        load_processors([Affine]).of(SamplingParams(extra_args={"affine": numbers}))


def test_the_last_processor_of_all_has_its_own_bit():
    bits, numbers = load_processors([BanBelow] * MAX_CUSTOM).of(SamplingParams(extra_args={"ban_below": 4}))
    assert bits.bit_count() == MAX_CUSTOM
    assert bits < 2**31
    assert numbers.tolist() == [4.0] * MAX_CUSTOM
