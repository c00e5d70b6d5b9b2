"""enable_eplb and eplb_config: what they ask for, and what they cannot."""

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.config.expert_balance import ExpertBalance
from jaxpaged.errors import ConfigError

SPREAD = {"enable_expert_parallel": True, "tensor_parallel_size": 4}


def asked(**options):
    return EngineConfig.from_options(**options).parallel.expert_balance


def test_what_is_asked_for_is_vllms_defaults_and_what_was_given():
    assert asked(**SPREAD) is None
    assert asked(**SPREAD, enable_eplb=True) == ExpertBalance(1000, 3000, 0, False)
    ranks = {"enable_expert_parallel": True, "data_parallel_size": 2}
    assert asked(**ranks, enable_eplb=True) == ExpertBalance(1000, 3000, 0, False)
    given = {"num_redundant_experts": 8, "step_interval": 500, "use_async": False, "policy": "default"}
    assert asked(**SPREAD, enable_eplb=True, eplb_config=given) == ExpertBalance(1000, 500, 8, False)
    assert asked(**SPREAD, eplb_config={"log_balancedness_interval": 1}) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enable_eplb": True}, "enable_expert_parallel is False, tensor_parallel_size 1 and data_parallel_size 1"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True},
            "enable_expert_parallel is True, tensor_parallel_size 1",
        ),
        ({**SPREAD, "eplb_config": {"num_redundant_experts": 4}}, "num_redundant_experts, but enable_eplb is off"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"step_intervals": 4}}, "step_intervals.*'step_interval'"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"step_interval": 3}}, "is 3; .* from 4 on"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"num_redundant_experts": True}}, "is True; .* from 0 on"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"log_balancedness": 1}}, "is 1; it must be true or false"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"use_async": True}}, "can only be False"),
        ({**SPREAD, "enable_eplb": True, "eplb_config": {"policy": "random"}}, "can only be 'default'"),
    ],
)
def test_what_cannot_be_is_an_error_that_says_what_to_do(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(**options)
