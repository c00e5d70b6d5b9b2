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
    """`function(state, *operands)` gives the next state, of the same shapes; the state's arrays are donated.

    repeats: how often what is timed happens in one call.
    """

    function: Callable
    state: Any
    operands: tuple[Any, ...] = ()
    repeats: int = 1


def fed_back(function: Callable, x: jax.Array, *operands: Any) -> Chain:
    """A chain of `function(x, *operands)`, which gives an array of any shape; a number of it goes into the next x.

    The state is (x, the last result).
    """
    out = jax.eval_shape(function, x, *operands)

    def call(state, *operands):
        x = touched(*state)
        return x, function(x, *operands)

    return Chain(call, (x, jnp.zeros(out.shape, out.dtype)), operands)


def touched(x: jax.Array, out: jax.Array) -> jax.Array:
    """x with its first number replaced by out's, in place: so a call waits for the last one, and nothing is copied.

    Were out the next x as a whole, a loop would copy it to where x is.
    """
    number = jnp.clip(out[(0,) * out.ndim].astype(jnp.float32), -1, 1)  # numbers must not grow from call to call
    return x.at[(0,) * x.ndim].set(number.astype(x.dtype))


@dataclasses.dataclass(frozen=True)
class Calls:
    """Some calls of a chain as one program, which is handed a state and gives back the next.

    count: how often what is timed happens in them.
    """

    count: int
    program: Any

    def seconds(self, state: Any, operands: tuple[Any, ...]) -> tuple[float, Any]:
        """(the best of several runs, for one of what is timed; the state afterwards)."""

        def run() -> None:
            nonlocal state
            state = jax.block_until_ready(self.program(state, *operands))

        run()
        return min(_timed(run) for _ in range(SAMPLES)) / self.count, state


def compiled(chain: Chain, count: int, options: dict[str, Any] | None = None) -> Calls:
    """`count` calls, compiled with these options of XLA; nothing runs. Threads may compile side by side."""
    jitted = jax.jit(_calls_of(chain, count), donate_argnums=0, compiler_options=options)
    program = jitted.lower(chain.state, *chain.operands)
    return Calls(count * chain.repeats, program.compile())


def seconds_per_call(chain: Chain, target_s: float = 0.1) -> float:
    """Of what is timed: the best of several runs, each of as many calls as take about `target_s` seconds."""
    first, state = compiled(chain, 1).seconds(chain.state, chain.operands)
    count = min(MAX_CALLS, math.ceil(target_s / (first * chain.repeats)))
    if count == 1:
        return first
    return compiled(dataclasses.replace(chain, state=state), count).seconds(state, chain.operands)[0]


def _calls_of(chain: Chain, calls: int) -> Callable:
    """A function from (state, *operands) to the state after so many calls."""

    def call(_, carried):
        # To the compiler operands change too: what a call does with them alone stays in the loop.
        state, operands = lax.optimization_barrier(carried)
        return chain.function(state, *operands), operands

    def run_calls(state, *operands):
        return lax.fori_loop(0, calls, call, (state, operands))[0]

    return run_calls


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
