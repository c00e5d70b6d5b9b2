"""The plain layers against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.embedding import embed, vocabulary_logits
from jaxpaged.layers.linear import Linear, apply_linear
from jaxpaged.layers.mlp import Mlp, gated_mlp
from jaxpaged.layers.norm import Norm, NormConfig, rms_norm
from pallas_kernels.few_rows_matmul import choose_backend

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("letters", "x", "weight"),
    [("TD,FD->TF", (3, 5), (7, 5)), ("TD,NHD->TNH", (3, 5), (2, 4, 5)), ("TNH,DNH->TD", (3, 2, 4), (5, 2, 4))],
)
def test_a_linear_layer_is_the_einsum_of_its_letters_plus_bias(letters, x, weight):
    x, weight = random(*x), random(*weight)
    bias = random(*weight.shape[: letters.index("->") - letters.index(",") - x.ndim])
    product = np.einsum(letters, x.astype(np.float64), weight)
    np.testing.assert_allclose(apply_linear(letters, x, Linear(weight)), product, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(apply_linear(letters, x, Linear(weight, bias)), product + bias, rtol=1e-5, atol=1e-5)


def test_a_weight_must_be_spelled_outputs_first():
    with pytest.raises(AssertionError, match="outputs first"):
        apply_linear("TD,DF->TF", random(2, 3), Linear(random(3, 4)))


def test_bfloat16_products_are_accumulated_in_float32():
    x, weight = np.full((2, 4096), 1.0, jnp.bfloat16), np.full((3, 4096), 0.125, jnp.bfloat16)
    out = apply_linear("TD,FD->TF", jnp.asarray(x), Linear(jnp.asarray(weight)))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, 512)  # a bfloat16 sum of eighths stops growing long before


def test_norms_have_unit_rms_times_their_weight():
    x, weight = random(3, 16), random(16)
    unit = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_norm(x, Norm(weight), NormConfig(1e-5)), unit * weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        rms_norm(x, Norm(weight), NormConfig(1e-5, is_offset=True)), unit * (1 + weight), rtol=1e-4, atol=1e-6
    )


def test_norms_of_half_precision_are_computed_in_float32():
    x = jnp.full((2, 8), 300.0, jnp.float16)  # its square is beyond float16
    np.testing.assert_allclose(rms_norm(x, Norm(jnp.ones(8, jnp.float16)), NormConfig(1e-6)), 1, rtol=1e-3)


def test_the_gate_goes_through_the_activation():
    x, gate, up, down = random(3, 4), random(6, 4), random(6, 4), random(4, 6)
    z = x @ gate.T
    expected = (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.T
    p = Mlp(Linear(gate), Linear(up), Linear(down))
    np.testing.assert_allclose(gated_mlp(x, p, "silu"), expected, rtol=1e-4, atol=1e-5)
    tanh = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    expected = (tanh * (x @ up.T)) @ down.T
    np.testing.assert_allclose(gated_mlp(x, p, "gelu_pytorch_tanh"), expected, rtol=1e-4, atol=1e-5)


def test_embeddings_are_rows_times_a_scale_in_the_tables_type():
    table = jnp.asarray(random(5, 3), jnp.bfloat16)
    tokens = jnp.array([4, 0, 4])
    np.testing.assert_array_equal(embed(tokens, table, None), np.asarray(table)[[4, 0, 4]])
    scaled = embed(tokens, table, 48**0.5)
    assert scaled.dtype == jnp.bfloat16
    np.testing.assert_array_equal(scaled, table[tokens] * jnp.bfloat16(48**0.5))


def test_logits_are_float32_capped_and_minus_infinity_in_the_padding():
    hidden, table = random(2, 4), random(6, 4)
    plain = hidden @ table.T
    logits = vocabulary_logits(jnp.asarray(hidden), jnp.asarray(table), 5, None)
    np.testing.assert_allclose(logits[:, :5], plain[:, :5], rtol=1e-4, atol=1e-5)
    assert np.all(np.isneginf(logits[:, 5:]))
    capped = vocabulary_logits(jnp.asarray(hidden), jnp.asarray(table), 5, 0.7)
    np.testing.assert_allclose(capped[:, :5], 0.7 * np.tanh(plain[:, :5] / 0.7), rtol=1e-4, atol=1e-5)
    assert np.all(np.isneginf(capped[:, 5:]))


@pytest.mark.parametrize("rows", [2, 64])
def test_logits_of_a_model_in_16_bits_are_not_rounded_to_them(rows):
    hidden, table = (jnp.asarray(each, jnp.bfloat16) for each in (random(rows, 256), random(600, 256)))
    logits = vocabulary_logits(hidden, table, 600, None, choose_backend("auto", "cpu"))
    exact = np.float64(hidden) @ np.float64(table).T
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, exact, atol=2e-5)
