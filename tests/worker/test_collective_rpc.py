"""Functions of callers reach the worker and the parameters; nothing is pickled."""

import contextlib
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxpaged.errors import ConfigError, ConflictError, UsageError
from jaxpaged.executor.uniproc import UniProcExecutor
from jaxpaged.worker.extension import worker_class
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


# ---- what a worker extension declares ----------------------------------------------------------------


class Extension:
    """Mixed into the worker."""

    factor = 2

    def scaled_weight(self, times=1):
        return {"scaled": int(self.device.params["weight"]) * self.factor * times, "of": (1, 2)}

    def gives_an_array(self):
        return self.device.params["weight"]

    def _hidden(self):
        return 1


class Clashes:
    def sleep(self):
        pass


PLACE = f"{__name__}:{{}}"


@pytest.fixture
def extended(executor):
    executor.worker.__class__ = worker_class(f"{__name__}.Extension")
    return executor


def test_an_extension_is_called_by_name_and_gives_plain_data(extended):
    ask = lambda name, *args, **kwargs: extended.collective_rpc("call_extension", (name, args, kwargs), {})
    assert ask("scaled_weight", times=5) == [{"scaled": 30, "of": (1, 2)}]
    assert extended.collective_rpc("scaled_weight", (), {})[0]["scaled"] == 6  # in this process
    for name in ("_hidden", "factor", "sleep", "apply_model", "call_extension", "__init__"):
        with pytest.raises(UsageError, match=f"declares no {name!r}"):
            ask(name)
    with pytest.raises(UsageError, match="gives_an_array returned what is no plain data"):
        ask("gives_an_array")


def test_extensions_that_cannot_be_are_named(executor):
    assert worker_class(None) is Worker
    for name, words in (
        ("Clashes", "has sleep, which every worker has"),
        ("PLACE", "and no class"),
        ("Missing", "cannot be loaded: AttributeError"),
    ):
        with pytest.raises(ConfigError, match=words):
            worker_class(PLACE.format(name))
    with pytest.raises(UsageError, match="there is no worker extension to call 'x' of"):
        executor.collective_rpc("call_extension", ("x", (), {}), {})
