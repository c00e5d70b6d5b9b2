"""Models whose checkpoints were quantised compute what they would with the weights that these stand for."""

from itertools import product

import jax
import numpy as np
import pytest

from jaxpaged.models.config import load_hf_config
from jaxpaged.params import forms, quantized
from jaxpaged.params.orbax_format import save_orbax
from jaxpaged.params.quantized import QuantizedArray, StoredArray, is_quantized
from jaxpaged.params.schemes.scheme import Numbers
from pallas_kernels.int4_matmul import unpack_values
from tests.models.paged import PagedModel
from tests.models.quantised_checkpoints import FORMATS, MODELS, write_quantised
from tests.params.test_orbax_format import load

PROMPT = np.random.default_rng(3).integers(3, MODELS["llama"]["vocab_size"], 16).tolist()


def named(params):
    """(path, parameter) of all."""
    return jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)[0]


def written_out(path, param):
    """The float32 numbers that a parameter stands for."""
    if isinstance(param, QuantizedArray):
        scales = np.asarray(param.scales)
        spread = np.expand_dims(scales, tuple(range(scales.ndim, param.values.ndim)))
        return np.asarray(param.values).astype(np.float32) * spread
    if not isinstance(param, StoredArray):
        return np.asarray(param)
    is_experts = "mlp" in jax.tree_util.keystr(path) and param.values.ndim == 3
    assert not (is_experts and param.zeros is not None), "products of experts know no zeros"
    groups_last = lambda part: np.moveaxis(np.asarray(part), int(is_experts), -1)
    scales = groups_last(param.scales)
    values = np.asarray(param.values)
    if param.is_packed:
        values = np.asarray(unpack_values(values.reshape(*scales.shape[:-1], -1)))
    weight = values.astype(np.float32).reshape(*scales.shape, -1)
    if param.zeros is not None:
        weight = weight - groups_last(param.zeros)[..., None]
    elif param.is_packed:
        weight = weight - 8
    weight = (weight * scales[..., None]).reshape(*scales.shape[:-1], -1)
    if param.order is not None:
        weight = weight[..., np.argsort(np.asarray(param.order))]
    return weight.reshape(param.shape)


EXACT_ROWS = {
    "cpu": {"gptq whole rows", "w8a16", "w8a8"},
    "gpu": {"gptq whole rows", "w8a16", "w8a8", "float-quantized", "fp8 of a tensor", "mxfp4"},
}
"""Formats that rows have as they are, on a device that has products of such numbers."""
IN_BYTES = {"gptq symmetric", "gptq whole rows", "w4a16 asymmetric"}
"""Formats whose values lie two to a byte on a GPU: groups are of whole registers of them."""
WAYS = [("16bit", "cpu"), ("stored", "gpu"), ("rows", "cpu"), ("rows", "gpu")]


def check(path, param, expected, is_exact):
    """That a parameter stands for `expected`, or for what is as near as rows of its type have it."""
    found = written_out(path, param)
    if is_exact or not isinstance(param, QuantizedArray):
        np.testing.assert_allclose(found, expected, rtol=1e-6 if is_quantized(param) else 0, atol=0)
        return
    largest = np.abs(expected).max(tuple(range(param.scales.ndim, expected.ndim)), keepdims=True)
    is_whole = param.values.dtype == np.int8
    assert np.all(
        np.abs(found - expected) <= (largest / 253 if is_whole else np.abs(expected) / 15.9 + largest * 2.0**-18)
    )


@pytest.mark.parametrize(
    ("kind", "model"), [*product(FORMATS, ["llama", "phi3", "mixtral"]), ("w4a16", "llama4"), ("fp8 blocks", "llama4")]
)
def test_weights_of_every_format_are_what_they_stand_for(kind, model, tmp_path):
    """Apart, fused, and of experts; as they are computed with in 16 bits, as they were stored, and in rows."""
    write_quantised(tmp_path, kind, model)
    exact = named(PagedModel(tmp_path / "exact").params)
    for form, platform in WAYS:
        found = named(PagedModel(tmp_path, form=form, platform=platform).params)
        is_exact = form != "rows" or kind in EXACT_ROWS[platform]
        assert any(is_quantized(param) for _, param in found) == (form != "16bit")
        for (path, param), (_, expected) in zip(found, exact, strict=True):
            check(path, param, expected, is_exact and not (form == "stored" and isinstance(param, QuantizedArray)))
            if form == "stored" and kind in IN_BYTES and "q_proj" in jax.tree_util.keystr(path):
                assert param.is_packed and param.values.shape[-1] == expected.shape[-1] // 2
            if isinstance(param, StoredArray) and ("mxfp4" in kind or "nvfp4" in kind):
                bits = 8 * param.nbytes / param.values.size
                assert (param.values.dtype.name, bits) == ("float4_e2m1fn", 4.5 if "mxfp4" in kind else 6)


@pytest.mark.parametrize(
    ("kind", "model", "form", "num_shards"),
    [
        pytest.param("gptq", "phi3", "stored", 1, marks=pytest.mark.exhaustive),
        ("gptq shuffled", "llama", "stored", 1),
        pytest.param("gptq symmetric", "mixtral", "stored", 2, marks=pytest.mark.exhaustive),
        ("w4a16 asymmetric", "llama", "stored", 1),
        ("w4a16", "mixtral", "stored", 2),
        pytest.param("w4a16", "qwen2_moe", "stored", 2, marks=pytest.mark.exhaustive),
        ("awq", "llama", "stored", 4),
        ("fp8 blocks e8m0", "llama", "rows", 2),
        pytest.param("mxfp4", "mixtral", "rows", 1, marks=pytest.mark.exhaustive),
        ("mxfp4", "mixtral", "stored", 2),
        ("w8a8", "llama", "16bit", 1),
    ],
)
def test_logits_are_those_of_what_the_weights_stand_for(kind, model, form, num_shards, tmp_path):
    write_quantised(tmp_path, kind, model)
    stored = PagedModel(tmp_path, num_shards, form=form, platform="gpu")
    exact = PagedModel(tmp_path / "exact")
    if form == "rows":
        params = jax.tree_util.tree_map_with_path(
            written_out, PagedModel(tmp_path, form=form, platform="gpu").params, is_leaf=is_quantized
        )
        exact.params = params
    expected, logits = (each.logits(PROMPT) for each in (exact, stored))
    tolerance = 0 if form == "16bit" else 1e-4
    if num_shards == 4:  # which would cut groups of the feed-forward: its weights are rounded
        mlp, attention = stored.params.layers[0].mlp, stored.params.layers[0].self_attn
        assert isinstance(mlp.down_proj.weight, QuantizedArray) and isinstance(attention.o_proj.weight, StoredArray)
        tolerance = 0.02
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("method", ["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"])
def test_models_in_16_bits_are_rounded_to_floats_of_8_bits(method, tmp_path, monkeypatch):
    """Blocks of 16 in place of 128, which these models do not have; in experts too."""
    monkeypatch.setattr(quantized, "BLOCK", 16)
    monkeypatch.setattr(forms, "OF_BLOCKS", Numbers("float8_e4m3fn", 16))
    write_quantised(tmp_path, "w8a8", "mixtral")
    rounded, exact = PagedModel(tmp_path / "exact", quantization=method, platform="gpu"), PagedModel(tmp_path / "exact")
    for (path, param), (_, expected) in zip(named(rounded.params), named(exact.params), strict=True):
        if is_quantized(param):
            largest = np.abs(expected).max()
            assert np.all(np.abs(written_out(path, param) - expected) <= np.abs(expected) / 15.9 + largest / 448 / 512)
        assert isinstance(param, StoredArray) == (method == "fp8_per_block" and "proj" in jax.tree_util.keystr(path))
    params = jax.tree_util.tree_map_with_path(written_out, rounded.params, is_leaf=is_quantized)
    exact.params = params
    logits = [each.logits(PROMPT) for each in (exact, rounded)]
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4 * np.abs(logits[0]).max())


def test_a_quantised_checkpoint_is_converted_to_what_it_stands_for(tmp_path):
    write_quantised(tmp_path / "model", "gptq", "phi3")
    specs, config, params = load(tmp_path / "model")
    save_orbax(specs, config, params, tmp_path / "model", tmp_path / "converted")
    assert "quantization_config" not in load_hf_config(tmp_path / "converted")
    found, expected = (PagedModel(folder).params for folder in (tmp_path / "converted", tmp_path / "model" / "exact"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
