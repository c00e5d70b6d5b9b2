"""Chains do as many calls as they are asked for, each on the last one's result; no test looks at the clock."""

import itertools

import jax
import jax.numpy as jnp

from pallas_kernels import timing
from pallas_kernels.timing import Chain, fed_back, measured_bandwidth, measured_matmul, seconds_per_call


def test_a_run_makes_its_calls_one_after_another():
    chain = Chain(lambda x, y: x * 2 + y, jnp.zeros(()), (jnp.ones(()),))
    calls = timing.compiled(chain, 3)
    state = calls.program(chain.state, *chain.operands)
    assert state == 7  # three times 2 x + 1
    _, state = calls.seconds(state, chain.operands)
    assert state == 2.0 ** (3 * (2 + timing.SAMPLES)) - 1  # one run more, to warm up


def test_each_call_of_a_fed_back_chain_sees_a_number_of_the_last_result():
    chain = fed_back(lambda x, y: jnp.sum(x, keepdims=True) * y, jnp.asarray([7.0, 0.25]), jnp.float32(2))
    x, out = timing.compiled(chain, 2).program(chain.state, *chain.operands)
    assert x.tolist() == [0.5, 0.25]  # the first call saw [0, 0.25], its result being zero before it
    assert out.tolist() == [1.5]


def test_what_a_call_does_with_its_operands_alone_is_done_in_every_call():
    chain = fed_back(lambda x, y: x + jnp.sort(y), jnp.zeros(64), jnp.ones(64))
    run_calls = timing._calls_of(chain, 3)
    text = jax.jit(run_calls).lower(chain.state, *chain.operands).compile().as_text()
    computations = text.split("\n\n")
    sorting = [part for part in computations if " sort(" in part]
    assert len(sorting) == 1
    assert "ENTRY" not in sorting[0]


def test_the_time_of_a_call_is_that_of_a_run_over_its_calls(monkeypatch):
    ticks = itertools.count(step=1 / 16)  # seconds that every run takes, whatever it does
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert seconds_per_call(Chain(lambda x: x + 1, jnp.zeros(3)), target_s=0.5) == 1 / 16 / 8


def test_what_happens_several_times_in_a_call_takes_that_much_less(monkeypatch):
    ticks = itertools.count(step=1 / 16)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    assert seconds_per_call(Chain(lambda x: x + 2, jnp.zeros(3), repeats=2), target_s=0.5) == 1 / 16 / 8 / 2


def test_what_the_device_can_do_is_in_bytes_and_operations_per_second(monkeypatch):
    monkeypatch.setattr(timing, "seconds_per_call", lambda chain: 0.5)
    assert measured_bandwidth(1000) == 4000
    assert measured_matmul(10, jnp.float32) == 4000
