"""How long a program takes on this machine's device, and what the device can do at most.

A function is called many times inside of one program, each call working on the result of the last, so that neither
the host's part nor the compiler hides anything. This module knows nothing of what it times.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SAMPLES = 5
MAX_CALLS = 1000


@dataclasses.dataclass(frozen=True)
class Chain:
    """`function(state, *operands)` gives the next state, of the same shapes; the state's arrays are donated."""

    function: Callable
    state: Any
    operands: tuple[Any, ...] = ()


def seconds_per_call(chain: Chain, target_s: float = 0.1) -> float:
    """The best of several runs, each of as many calls as take about `target_s` seconds."""
    once, state = _run_of(chain, chain.state, 1)
    first = min(_timed(once) for _ in range(SAMPLES))
    calls = min(MAX_CALLS, math.ceil(target_s / first))
    if calls == 1:
        return first
    many, _ = _run_of(chain, state(), calls)
    return min(_timed(many) for _ in range(SAMPLES)) / calls


def _run_of(chain: Chain, state: Any, calls: int) -> tuple[Callable[[], None], Callable[[], Any]]:
    """(run `calls` calls and wait, the state now); compiled and warm."""

    def run_calls(state, *operands):
        return lax.fori_loop(0, calls, lambda _, state: chain.function(state, *operands), state)

    program = jax.jit(run_calls, donate_argnums=0).lower(state, *chain.operands).compile()
    now = [state]

    def run() -> None:
        now[0] = jax.block_until_ready(program(now[0], *chain.operands))

    run()
    return run, lambda: now[0]


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured_bandwidth(num_bytes: int) -> float:
    """Bytes per second, read and written, of a program that adds one to `num_bytes` of numbers."""
    numbers = jnp.zeros(num_bytes // 4, jnp.uint32)
    return 2 * num_bytes / seconds_per_call(Chain(lambda x: x + 1, numbers))


def measured_matmul(size: int, dtype: Any) -> float:
    """Operations per second of a product of square matrices."""
    x, weight = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    weight *= size**-0.5  # the chain's numbers keep their size
    return 2 * size**3 / seconds_per_call(Chain(jnp.matmul, x, (weight,)))
