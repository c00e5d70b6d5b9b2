"""Functions of callers reach the worker and the parameters; nothing is pickled."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxpaged.errors import ConflictError, UsageError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.worker.weights import Weights
from jaxpaged.worker.worker import Worker


@pytest.fixture
def executor():
    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.worker = Worker.__new__(Worker)
    executor.worker.device = SimpleNamespace(params={"weight": jnp.asarray(3)})
    executor.worker.weights = Weights(lambda: None, lambda: "files", keeps_copies=False)
    return executor


def test_a_function_gets_the_worker_first(executor):
    call = lambda worker, times, more: (worker is executor.worker, times, more)
    assert executor.collective_rpc(call, (2,), {"more": 3}) == [(True, 2, 3)]


def test_a_method_is_called_by_name(executor):
    assert executor.collective_rpc("apply_model", (lambda params: params["weight"] + 1,), {}) == [4]


@pytest.mark.parametrize("name", ["nonsense", "runner", "__init__", "_make_runner"])
def test_what_is_no_public_method_is_refused(executor, name):
    with pytest.raises(UsageError, match=f"no method {name!r}"):
        executor.collective_rpc(name, (), {})


def test_parameters_that_sleep_are_refused(executor):
    executor.worker.device.params = None
    with pytest.raises(ConflictError, match="weights sleep"):
        executor.collective_rpc("apply_model", (id,), {})


def other_weights(worker):
    worker.device.params = {"weight": jnp.asarray(4)}


def set_one(params):
    params["weight"] = jnp.asarray(4)


def fail_half_way(worker):
    other_weights(worker)
    raise OSError("the rest is missing")


@pytest.mark.parametrize(
    "call",
    [(other_weights, ()), ("apply_model", (set_one,)), (fail_half_way, ())],
    ids=["a function", "apply_model", "a function that fails"],
)
def test_weights_that_a_function_replaces_have_another_name(executor, call):
    executor.collective_rpc("apply_model", (lambda params: params["weight"],), {})
    before = executor.weights_version
    with contextlib.suppress(OSError):
        executor.collective_rpc(*call, {})
    assert executor.weights_version != before
    again = executor.weights_version
    executor.collective_rpc(lambda worker: None, (), {})
    assert executor.weights_version == again
