"""Weights in 8 and 4 bits: how they are rounded, and that every way to load them gives the same ones."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import ConfigError
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import DummyParams, load_params, num_bytes
from jaxpaged.params.orbax_format import save_orbax
from jaxpaged.params.quantized import (
    GROUP,
    LAST_AXIS,
    WHOLE_ROWS,
    ZERO,
    PackedArray,
    QuantizedArray,
    float_blocks,
    is_quantized,
    pack,
    packed_rows,
    quantize,
    quantized_specs,
)
from jaxpaged.params.sharding import param_shapes
from pallas_kernels import int4_matmul
from tests.models.checkpoints import CONFIGS, write_checkpoint

WIDE = {**CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
"""Every projection of it can have 4 bits, on eight devices too."""
NAMES = ("llama_mqa_bias_tied", "gemma3", "phi3_partial")  # one key head; offsets as norms; fused tensors


def describe(name, num_shards=1, method="int8"):
    model = model_for(CONFIGS[name])
    config = model.config_from_hf(CONFIGS[name])
    return quantized_specs(model.param_specs(config, num_shards), method, config.dim_sizes()), config


def load(name, folder, num_shards=1, method="int8", dtype=jnp.float32):
    specs, config = describe(name, num_shards, method)
    return load_params(specs, config, folder, make_mesh(num_shards), dtype)


def numbers(param):
    """The numpy float32 array that a parameter stands for."""
    if not is_quantized(param):
        return np.asarray(param, np.float32)
    if isinstance(param, PackedArray):
        rows = (part.reshape(-1, part.shape[-1]) for part in (param.packed, param.scales))
        return np.asarray(int4_matmul.unpack(*rows)).reshape(param.shape)
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
        "model.embed_tokens.weight": "int8",
        "model.layers.0.self_attn.k_proj.weight": "int8",
        "model.layers.0.self_attn.k_proj.bias": None,
        "model.layers.0.input_layernorm.weight": None,
        "model.norm.weight": None,
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


@pytest.fixture
def wide(monkeypatch, tmp_path):
    """The folder of a checkpoint, which `CONFIGS` has under the name "wide"."""
    monkeypatch.setitem(CONFIGS, "wide", WIDE)
    return write_checkpoint("wide", tmp_path / "wide")


def test_four_bits_are_for_what_is_read_by_a_product_and_divides(wide):
    of = lambda name: {spec.hf_name: spec.quantized for spec in jax.tree.leaves(describe(name, method="int4")[0])}
    assert (
        of("wide").items()
        >= {
            "model.embed_tokens.weight": "int8",
            "lm_head.weight": "int8",
            "model.layers.0.self_attn.k_proj.weight": "int4",
            "model.layers.0.self_attn.o_proj.weight": "int4",
            "model.layers.1.mlp.down_proj.weight": "int4",
            "model.norm.weight": None,
        }.items()
    )
    experts = of("qwen2_moe")  # its width divides, its heads and experts do not
    assert experts["model.layers.0.self_attn.q_proj.weight"] == "int4"
    assert experts["model.layers.0.self_attn.o_proj.weight"] == "int8"
    assert {found for name, found in experts.items() if ".experts." in name} == {"int8"}


def test_packed_weights_are_the_same_on_one_device_and_on_eight_and_as_the_host_rounds_them(wide):
    exact, one, eight = (load("wide", wide, shards, method) for shards, method in ((1, None), (1, "int4"), (8, "int4")))
    num_packed = 0
    for weight, param, sharded in zip(jax.tree.leaves(exact), params_of(one), params_of(eight), strict=True):
        np.testing.assert_array_equal(numbers(sharded)[once_each(sharded.shape, weight.shape)], numbers(param))
        if isinstance(param, PackedArray):
            num_packed += 1
            jax.tree.map(np.testing.assert_array_equal, (param.packed, param.scales), pack(np.asarray(weight)))
            assert param.nbytes * 8 == 4.5 * weight.size and param.dtype == "float32"
    assert num_packed == 7 * WIDE["num_hidden_layers"]


def test_packed_shapes_announce_what_loading_gives(wide):
    specs, config = describe("wide", 8, "int4")
    shapes, params = param_shapes(specs, config, make_mesh(8), jnp.float32), load("wide", wide, 8, "int4")
    assert jax.tree.structure(shapes) == jax.tree.structure(params)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(params), strict=True):
        assert (shape.shape, shape.dtype, shape.sharding) == (array.shape, array.dtype, array.sharding)


def test_packed_weights_come_from_orbax_and_from_nothing_alike(wide, tmp_path):
    exact, config = describe("wide", method=None)
    save_orbax(exact, config, load("wide", wide, method=None), wide, tmp_path / "orbax")
    stored = load("wide", tmp_path / "orbax", method="int4")
    jax.tree.map(np.testing.assert_array_equal, stored, load("wide", wide, method="int4"))
    plain = DummyParams(exact, config, make_mesh(1), jnp.float32, seed=3).make()
    made = DummyParams(describe("wide", method="int4")[0], config, make_mesh(1), jnp.float32, seed=3).make()
    weight, packed = (params.layers[0].mlp.down_proj.weight for params in (plain, made))
    error = np.abs(numbers(packed) - np.asarray(weight))
    assert 0 < error.max() <= 1.04 * np.abs(np.asarray(packed.scales, np.float32)).max()
    assert np.median(error) < 0.04 * np.abs(np.asarray(weight)).max()  # half a step, an eighth of the largest, is 0.06


def test_what_cannot_have_four_bits_is_refused(monkeypatch):
    with pytest.raises(
        ConfigError, match="no matrix of this model has a last axis that is a multiple of 64. Choose 'int8'"
    ):
        describe("llama", method="int4")
    monkeypatch.setitem(CONFIGS, "uneven", {**WIDE, "intermediate_size": 320})
    specs, config = describe("uneven", 8, "int4")
    message = "model.layers.0.mlp.down_proj.weight has 10 of them for each output, which 8 devices cannot share"
    with pytest.raises(ConfigError, match=message):
        param_shapes(specs, config, make_mesh(8), jnp.float32)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_packing_is_off_by_half_a_scale_and_by_a_whole_one_at_the_other_end(xp):
    weight_FD = np.random.default_rng(0).normal(size=(7, 192)).astype(np.float32)
    weight_FD[2, 32:64] = 0
    weight_FD[3, 0], weight_FD[3, 1] = 9, -9  # the first is eight scales away from zero, the other can be seven
    packed_FB, scale_FC = (np.asarray(part) for part in packed_rows(xp.asarray(weight_FD), xp))
    assert packed_FB.dtype == np.uint8 and np.array_equal(scale_FC, scale_FC.astype(jnp.bfloat16).astype(np.float32))
    found = np.asarray(int4_matmul.unpack(jnp.asarray(packed_FB), jnp.asarray(scale_FC)))
    step_FD = np.repeat(np.abs(scale_FC), GROUP, axis=1)
    steps_FD = np.abs(weight_FD) / np.where(step_FD == 0, 1, step_FD)
    # A scale of bfloat16 is off by a 256th at most, which is a 32nd of a step at eight of them.
    bound_FD = np.where(steps_FD > 7, 1, 0.5) + 0.04
    assert np.all(np.abs(found - weight_FD) <= bound_FD * step_FD) and not found[2, 32:64].any()
    error_of_extremes = np.abs(found - weight_FD)[steps_FD > 7.9]
    assert np.median(error_of_extremes) < 0.05 * np.median(step_FD)


def test_the_kernels_read_what_is_packed():
    assert (GROUP, LAST_AXIS, ZERO) == (int4_matmul.GROUP, int4_matmul.INPUTS, int4_matmul.ZERO)


def test_floats_of_8_bits_have_a_scale_for_an_output_a_matrix_or_a_block():
    weight = np.random.default_rng(5).standard_normal((150, 256), np.float32)
    weight[3] = 0
    for form, num_scales in (("float8_e4m3fn", 150), (WHOLE_ROWS, 1)):
        values, scales = quantize(weight, 1, form)
        assert (values.dtype, scales.shape) == (ml_dtypes.float8_e4m3fn, (150,))
        assert (len(np.unique(scales)) == 1) == (num_scales == 1)
        off = np.abs(values.astype(np.float32) * scales[:, None] - weight)
        assert np.all(off <= np.abs(weight) / 16 + scales[:, None] * 2.0**-10)
    values, scales = float_blocks(weight)
    assert scales.shape == (150, 2) and len(np.unique(scales)) == 4
    np.testing.assert_allclose(scales[:128, 1], np.abs(weight[:128, 128:]).max() / 448, rtol=1e-6)
    off = np.abs(values.astype(np.float32) - weight / np.repeat(scales, 128, 1))
    assert off.max() <= 16


def test_numbers_of_few_bits_times_powers_of_two_stay_as_they_are_in_rows_of_floats():
    steps = np.array([0.5, 1, 1.5, 2, 3, 4, -6, -0.5], np.float32)
    weight = np.concatenate([steps * 2.0**power for power in range(-7, 8)])[None]
    values, scales = quantize(weight * 2.0**-20, 1, "float8_e4m3fn")
    np.testing.assert_array_equal(values.astype(np.float32) * scales, weight * 2.0**-20)
