"""Backends of all ops: whoever says that it takes operands takes them, and the definition takes what others do not."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import few_rows_matmul, grouped_matmul, int4_matmul, lora_matmul, rms_norm

FLOATS = ("bfloat16", "float16", "float32")
ROWS = (1, 2, 7, 65, 200)


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def norms(num_rows):
    for x, weight, width in itertools.product(FLOATS, FLOATS, (32, 40)):
        operands = array(x, num_rows, width), array(weight, width)
        call = lambda x, weight, backend: rms_norm.rms_norm(x, weight, rms_norm.How(1e-5), backend=backend)
        yield rms_norm.backends, call, operands, x == weight


def few_rows(num_rows):
    types = (*FLOATS, "int8", "int16")
    for x, weight in itertools.product(types, types):
        operands = array(x, num_rows, 64), array(weight, 24, 64)
        call = lambda x, weight, backend: few_rows_matmul.few_rows_matmul(x, weight, backend=backend)
        yield few_rows_matmul.backends, call, operands, few_rows_matmul.WEIGHTS.get(x) == weight


def int4(num_rows):
    for x in FLOATS:
        operands = array(x, num_rows, 64), array("uint8", 24, 32), array("bfloat16", 24, 2)
        call = lambda *operands, backend: int4_matmul.int4_matmul(*operands, backend=backend)
        yield int4_matmul.backends, call, operands, True


def grouped(num_rows):
    for x, weight in itertools.product(FLOATS, (*FLOATS, "int8")):
        scales = array("float32", 3, 1, 24) if weight == "int8" else None
        operands = array(x, num_rows, 64), grouped_matmul.ExpertWeights(array(weight, 3, 24, 64), scales)
        call = lambda x, weights, backend: grouped_matmul.grouped_matmul(
            x, weights, jnp.zeros(3, jnp.int32), backend=backend
        )
        yield grouped_matmul.backends, call, operands, True


def adapters(num_rows):
    for x, base in itertools.product(FLOATS, FLOATS):
        operands = array(x, num_rows, 64), array(x, 3, 5, 64)
        call = lambda x, a, backend, base=base: lora_matmul.lora_matmul(
            x,
            a,
            jnp.zeros((3, 5, 24), x.dtype),
            jnp.zeros(len(x), jnp.int32),
            jnp.zeros((len(x), 24), base),
            dtype=base,
            backend=backend,
        )
        yield lora_matmul.backends, call, operands, True


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("problems", [norms, few_rows, int4, grouped, adapters], ids=lambda problems: problems.__name__)
def test_who_says_that_it_takes_operands_takes_them(problems, num_rows):
    for backends, call, operands, defined in problems(num_rows):
        for backend, reason in backends("cpu", *operands).items():
            if reason is None and (defined or backend != "reference"):
                traced = jax.eval_shape(lambda *operands, call=call, at=backend: call(*operands, backend=at), *operands)
                assert traced.shape[0] == num_rows, (backend, operands)
