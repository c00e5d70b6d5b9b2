"""8-bit weights: how they are rounded, and that every way to load them gives the same ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import DummyParams, load_params, num_bytes
from jaxpaged.params.orbax_format import save_orbax
from jaxpaged.params.quantized import QuantizedArray, is_quantized, quantize, quantized_specs
from jaxpaged.params.sharding import param_shapes
from tests.models.checkpoints import CONFIGS, write_checkpoint

NAMES = ("llama_mqa_bias_tied", "gemma3", "phi3_partial")  # one key head; offsets as norms; fused tensors


def describe(name, num_shards=1, method="int8"):
    model = model_for(CONFIGS[name])
    config = model.config_from_hf(CONFIGS[name])
    return quantized_specs(model.param_specs(config, num_shards), method), config


def load(name, folder, num_shards=1, method="int8", dtype=jnp.float32):
    specs, config = describe(name, num_shards, method)
    return load_params(specs, config, folder, make_mesh(num_shards), dtype)


def numbers(param):
    """The numpy float32 array that a parameter stands for."""
    if not is_quantized(param):
        return np.asarray(param, np.float32)
    values, scales = np.asarray(param.values, np.float32), np.asarray(param.scales)
    return values * np.expand_dims(scales, tuple(range(scales.ndim, values.ndim)))


def params_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_quantized)


def once_each(shape, stored):
    """The index that leaves out how key heads were repeated, or how the vocabulary was padded."""
    return tuple(slice(None, None, n // m) if n % m == 0 else slice(m) for n, m in zip(shape, stored, strict=True))


def test_a_weight_is_off_by_half_a_step_at_most_and_the_largest_of_a_row_not_at_all():
    weight = np.random.default_rng(0).standard_normal((3, 5, 7, 11), np.float32)
    weight[1, 2] = 0
    values, scales = quantize(weight, 2)
    assert (values.dtype, values.shape, scales.dtype, scales.shape) == (np.int8, weight.shape, np.float32, (3, 5))
    error = np.abs(values * scales[..., None, None] - weight)
    assert np.all(error <= scales[..., None, None] * (0.5 + 1e-4))
    assert np.all(np.abs(values).max((2, 3)) == np.where(scales == 0, 0, 127))
    assert scales[1, 2] == 0 and not values[1, 2].any()


def test_blocks_of_rows_are_rounded_as_one(monkeypatch):
    weight = np.random.default_rng(1).standard_normal((13, 8), np.float32)
    whole = quantize(weight, 1)
    monkeypatch.setattr("jaxpaged.params.quantized.ROUNDED_AT_ONCE", 5 * 8)
    jax.tree.map(np.testing.assert_array_equal, quantize(weight, 1), whole)


def test_matrices_are_quantized_and_vectors_are_not():
    specs, _ = describe("llama_mqa_bias_tied")
    assert {spec.hf_name: spec.quantized for spec in jax.tree.leaves(specs)}.items() >= {
        "model.embed_tokens.weight": True,
        "model.layers.0.self_attn.k_proj.weight": True,
        "model.layers.0.self_attn.k_proj.bias": False,
        "model.layers.0.input_layernorm.weight": False,
        "model.norm.weight": False,
    }.items()
    assert not any(spec.quantized for spec in jax.tree.leaves(describe("gemma3", method=None)[0]))


@pytest.mark.parametrize("name", NAMES)
def test_loaded_weights_are_the_files_within_half_a_step_on_one_device_and_on_eight(name, tmp_path):
    write_checkpoint(name, tmp_path)
    exact, one, eight = load(name, tmp_path, method=None), load(name, tmp_path), load(name, tmp_path, 8)
    assert jax.tree.structure(one) == jax.tree.structure(eight)
    for weight, param, sharded in zip(jax.tree.leaves(exact), params_of(one), params_of(eight), strict=True):
        step = np.abs(numbers(weight)).max() / 127 if is_quantized(param) else 0
        np.testing.assert_allclose(numbers(param), numbers(weight), rtol=0, atol=0.501 * step)
        np.testing.assert_array_equal(numbers(sharded)[once_each(sharded.shape, weight.shape)], numbers(param))


def test_shapes_announce_what_loading_gives(tmp_path):
    write_checkpoint("phi3_partial", tmp_path)
    specs, config = describe("phi3_partial", 8)
    shapes, params = param_shapes(specs, config, make_mesh(8), jnp.float32), load("phi3_partial", tmp_path, 8)
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding)
    exact = param_shapes(*describe("phi3_partial", 8, method=None), make_mesh(8), jnp.float32)
    assert num_bytes(shapes) < 0.4 * num_bytes(exact)


def test_an_orbax_checkpoint_gives_the_same_weights(tmp_path):
    folder = write_checkpoint("phi3_partial", tmp_path / "hf")
    exact, config = describe("phi3_partial", method=None)
    save_orbax(exact, config, load("phi3_partial", folder, method=None), folder, tmp_path / "orbax")
    stored = load("phi3_partial", tmp_path / "orbax")
    jax.tree.map(np.testing.assert_array_equal, stored, load("phi3_partial", folder))


def test_dummy_weights_are_the_quantized_dummy_weights():
    exact, config = describe("phi3_partial", method=None)
    plain = DummyParams(exact, config, make_mesh(1), jnp.float32, seed=3).make()
    quantized = DummyParams(describe("phi3_partial")[0], config, make_mesh(1), jnp.float32, seed=3).make()
    head = quantized.lm_head
    assert isinstance(head, QuantizedArray) and head.dtype == "float32"
    for expected, found in zip(quantize(np.asarray(plain.lm_head), 1), (head.values, head.scales), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1)  # a tie may round to either side
    np.testing.assert_array_equal(quantized.norm.weight, plain.norm.weight)
