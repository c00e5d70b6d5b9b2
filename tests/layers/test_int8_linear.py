"""Products with 8-bit weights against numpy in float64, with bounds that follow from the scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.layers.embedding import embed, vocabulary_logits
from jaxpaged.layers.linear import Linear, apply_linear, converted_product, rows_product, silu_product
from jaxpaged.params.quantized import PackedArray, QuantizedArray, StoredArray, in_bytes, pack, quantize
from pallas_kernels.few_rows_matmul import gpu, two_plane_matmul
from pallas_kernels.int4_matmul import unpack

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((40, 96)).astype(np.float32)
VALUES, SCALES = quantize(WEIGHT, 1)
X = RNG.standard_normal((6, 96)).astype(np.float32) * np.array([1e-3, 1, 1, 1e3, 1, 1], np.float32)[:, None]


def planes_product(x, values):
    return two_plane_matmul(jnp.asarray(x), values, jnp.ones(len(values)), dtype="float32", backend="reference")


def quantized(weight, num_out_axes, dtype="float32"):
    values, scales = quantize(weight, num_out_axes)
    return QuantizedArray(jnp.asarray(values), jnp.asarray(scales), dtype)


def test_a_product_is_that_of_the_rounded_weights_as_far_as_16_bits_of_activations_go():
    expected = X.astype(np.float64) @ VALUES.T
    step_T1 = np.abs(X).max(1, keepdims=True) / 127
    bound = step_T1 / 508 * np.abs(VALUES.astype(np.float64)).sum(1) + 1e-6 * np.abs(expected)
    assert np.all(np.abs(planes_product(X, VALUES) - expected) <= bound)


def test_the_distance_to_the_exact_weights_is_bounded_by_half_a_step_of_each():
    found = rows_product(jnp.asarray(X), quantized(WEIGHT, 1), jnp.float32)
    half_step_TO = np.abs(X).sum(1, keepdims=True) * SCALES / 2
    sizes_O = (np.abs(VALUES).astype(np.float64) * SCALES[:, None]).sum(1)
    planes_TO = np.abs(X).max(1, keepdims=True) / 127 / 508 * sizes_O
    assert np.all(np.abs(found - X.astype(np.float64) @ WEIGHT.T) <= 1.001 * (half_step_TO + planes_TO))


def test_a_row_is_the_same_bits_in_any_batch():
    program = jax.jit(planes_product)
    alone = [program(X[i : i + 1].repeat(2, 0), VALUES)[0] for i in range(len(X))]
    np.testing.assert_array_equal(program(X, VALUES), np.stack(alone))


def test_rows_of_zeros_give_zeros_and_what_is_not_a_number_stays_in_its_row():
    x = X.copy()
    x[0], x[1, 3], x[2, 5] = 0, np.nan, np.inf
    out = np.asarray(planes_product(x, VALUES))
    assert not out[0].any() and np.isfinite(out[3:]).all()
    assert not np.isfinite(out[1]).any() and not np.isfinite(out[2]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_accelerators_convert_whole_numbers_exactly(dtype):
    x = jnp.asarray(X / 1000, dtype)
    exact = np.asarray(x, np.float64) @ VALUES.T
    np.testing.assert_allclose(converted_product(x, VALUES), exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())


def test_the_cpu_multiplies_integers_and_other_devices_convert():
    program = jax.jit(lambda x, w: rows_product(x, w, jnp.bfloat16))
    traced = program.trace(jnp.asarray(X, jnp.bfloat16), quantized(WEIGHT, 1))
    lowered = {platform: traced.lower(lowering_platforms=(platform,)) for platform in ("cpu", "tpu", "cuda")}
    products = {
        platform: [line for line in text.as_text().splitlines() if "dot_general" in line]
        for platform, text in lowered.items()
    }
    assert [len(lines) for lines in products.values()] == [1, 1, 1]
    assert "tensor<12x96xi8>, tensor<40x96xi8>) -> tensor<12x40xi32>" in products["cpu"][0]
    for platform in ("tpu", "cuda"):
        assert "tensor<6x96xbf16>, tensor<40x96xbf16>) -> tensor<6x40xf32>" in products[platform][0]


def test_linear_layers_take_quantized_weights_with_any_axes_and_a_bias():
    weight, bias = RNG.standard_normal((2, 4, 8)).astype(np.float32), RNG.standard_normal((2, 4)).astype(np.float32)
    values, scales = quantize(weight, 2)
    out = apply_linear("TD,NHD->TNH", jnp.asarray(X[1:3, :8]), Linear(quantized(weight, 2), bias))
    expected = np.einsum("TD,NHD,NH->TNH", X[1:3, :8].astype(np.float64), values, scales) + bias
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
    heads = RNG.standard_normal((5, 2, 4)).astype(np.float32)
    values, scales = quantize(heads, 1)
    out = apply_linear("TNH,DNH->TD", jnp.asarray(expected, jnp.bfloat16), Linear(quantized(heads, 1)))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.einsum("TNH,DNH,D->TD", expected, values, scales), rtol=0.05, atol=0.05
    )


def test_a_quantized_table_serves_as_embedding_and_as_head():
    table = quantized(WEIGHT, 1, "bfloat16")
    x = embed(jnp.array([4, 0, 39]), table, None)
    assert x.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(x, np.float32), (VALUES * SCALES[:, None])[[4, 0, 39]], rtol=2**-8)
    logits = vocabulary_logits(jnp.asarray(X[1:3], jnp.bfloat16), table, 38, None)
    assert logits.dtype == jnp.float32 and np.isneginf(logits[:, 38:]).all()
    exact = np.asarray(jnp.asarray(X[1:3], jnp.bfloat16), np.float64) @ (VALUES * SCALES[:, None]).T
    np.testing.assert_allclose(logits[:, :38], exact[:, :38], rtol=1e-3, atol=1e-3)


def in_groups(weight_O2I, num_groups):
    """A weight as a checkpoint's is on a GPU, of 4 bits with zeros, its inputs in another order; what it stands for."""
    groups = weight_O2I.reshape(*weight_O2I.shape[:2], num_groups, -1)
    scales = np.abs(groups).max(-1) / 7
    zeros = np.random.default_rng(5).integers(6, 10, scales.shape).astype(np.float32)
    values = np.clip(np.rint(groups / scales[..., None]) + zeros[..., None], 0, 15)
    order = np.random.default_rng(6).permutation(weight_O2I.shape[-1]).astype(np.int32)
    exact = ((values - zeros[..., None]) * scales[..., None]).reshape(weight_O2I.shape)[..., np.argsort(order)]
    packed = in_bytes(values.astype(np.uint8).reshape(weight_O2I.shape))
    of_groups = (np.moveaxis(x, -1, 0) for x in (scales, zeros))
    return StoredArray(*map(jnp.asarray, (packed, *of_groups, order)), "bfloat16", "gpu"), exact


@pytest.mark.parametrize("bits", [8, 4, "stored"])
def test_on_a_gpu_layers_multiply_with_weights_as_they_are(monkeypatch, bits):
    """Products, gates and what is added are the kernel's where it has tiles, with scales of the right outputs."""
    rng = np.random.default_rng(3)
    kind, call = jax.devices()[0].device_kind, gpu.call
    names = [f"{kind}, 8 rows, 48 x 96{gated}, {name}" for name in ("8 bits", "4 bits") for gated in ("", ", gated")]
    monkeypatch.setattr(gpu, "tuned", lambda: dict.fromkeys(names, gpu.Tiles(16, 32)))
    interpret, taken = jax.default_backend() != "gpu", []
    monkeypatch.setattr(gpu, "call", lambda *given: taken.append(given) or call(*given[:-1], interpret))
    weight_O2I = rng.normal(size=(24, 2, 96)).astype(np.float32)
    if bits == 8:
        weight = quantized(weight_O2I, 2, "bfloat16")
        exact_O2I = np.asarray(weight.values, np.float64) * np.asarray(weight.scales)[..., None]
    elif bits == "stored":
        weight, exact_O2I = in_groups(weight_O2I, 3)
    else:
        weight = PackedArray(*map(jnp.asarray, pack(weight_O2I)), "bfloat16")
        exact_O2I = np.asarray(unpack(weight.packed.reshape(48, -1), weight.scales.reshape(48, -1))).reshape(24, 2, 96)
    x = jnp.asarray(rng.normal(size=(5, 96)), jnp.bfloat16)
    both_TO2 = np.einsum("ti,oji->toj", np.asarray(x, np.float64), exact_O2I)
    p = Linear(weight, backend="gpu")
    near = {"rtol": 0.02, "atol": 0.2}
    np.testing.assert_allclose(apply_linear("TI,OJI->TOJ", x, p).astype(np.float32), both_TO2, **near)
    added = apply_linear("TI,OJI->TOJ", x, p, jnp.full((5, 24, 2), 100, jnp.bfloat16))
    np.testing.assert_allclose(added.astype(np.float32), both_TO2 + 100, atol=0.5)
    gate_TO, up_TO = both_TO2[..., 0], both_TO2[..., 1]
    silu_TO = silu_product(x, p).astype(np.float32)
    np.testing.assert_allclose(silu_TO, gate_TO / (1 + np.exp(-gate_TO)) * up_TO, **near)
    many = 2 if bits != "stored" else 13
    assert len(taken) == 3 and silu_product(jnp.tile(x, (many, 1)), p) is None
