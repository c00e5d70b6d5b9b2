"""How experts are moved between devices while an engine runs: vLLM's `enable_eplb` and `eplb_config`.

Its keys are checked here and nowhere else. This module knows no device.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from jaxpaged.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class ExpertBalance:
    """Every `step_interval` steps experts move to where the load of the last `window_size` steps is spread evenly;
    `num_redundant_experts` of them have a second place then, or a third. A run of decode steps counts as one step.

    `log_balancedness`: each time a line says how even the load was, and would have been.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False


LEAST = {"window_size": 1, "step_interval": 4, "num_redundant_experts": 0}
NEUTRAL = {"use_async": False, "policy": "default", "log_balancedness_interval": 1}
"""vLLM's other keys, at the values at which they ask for nothing: experts are moved between two steps, by the one
policy that there is, and what is logged is logged then."""


class BalanceOptions(Protocol):
    """The part of `ParallelConfig` that this is about."""

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def data_parallel_size(self) -> int: ...

    @property
    def enable_expert_parallel(self) -> bool: ...

    @property
    def enable_eplb(self) -> bool: ...

    @property
    def eplb_config(self) -> Mapping[str, Any]: ...


def expert_balance_of(options: BalanceOptions) -> ExpertBalance | None:
    """What the options ask for together; None: experts stay where they are. Raises ConfigError."""
    given = {key: value for key, value in options.eplb_config.items() if not is_neutral(key, value)}
    for key, value in given.items():
        check_key(key, value)
    if not options.enable_eplb:
        if given:
            raise ConfigError(f"eplb_config has {', '.join(given)}, but enable_eplb is off. Set it, or leave them out.")
        return None
    if not options.enable_expert_parallel or options.tensor_parallel_size * options.data_parallel_size == 1:
        raise ConfigError(
            "enable_eplb moves whole experts between devices, but enable_expert_parallel is "
            f"{options.enable_expert_parallel}, tensor_parallel_size {options.tensor_parallel_size} and "
            f"data_parallel_size {options.data_parallel_size}. Set the first, and one of the others to 2 or more, or "
            "leave enable_eplb out."
        )
    return ExpertBalance(**given)


def is_neutral(key: str, value: Any) -> bool:
    return key in NEUTRAL and type(value) is type(NEUTRAL[key]) and value == NEUTRAL[key]


def check_key(key: str, value: Any) -> None:
    """Raises ConfigError for an unknown key, and for a value that it cannot have."""
    known = asdict(ExpertBalance())
    if key in NEUTRAL:
        raise ConfigError(f"eplb_config.{key} is {value!r}; here it can only be {NEUTRAL[key]!r}. Leave it out.")
    if key not in known:
        raise ConfigError(f"eplb_config has the unknown key {key!r}.{did_you_mean(key, (*known, *NEUTRAL))}")
    if key in LEAST and (type(value) is not int or value < LEAST[key]):
        raise ConfigError(f"eplb_config.{key} is {value!r}; it must be a whole number from {LEAST[key]} on.")
    if key not in LEAST and type(value) is not bool:
        raise ConfigError(f"eplb_config.{key} is {value!r}; it must be true or false.")
