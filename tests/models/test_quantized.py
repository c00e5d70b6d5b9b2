"""Models with weights in 8 and 4 bits, on one device and on several, against the same models with those weights written
out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.params.quantized import PackedArray, is_quantized
from pallas_kernels.int4_matmul import unpack
from tests.models.checkpoints import CONFIGS, prompt_of, write_checkpoint
from tests.models.paged import PagedModel
from tests.params.test_quantized import WIDE


def written_out(param):
    """The float32 weights that a quantized parameter stands for."""
    if not is_quantized(param):
        return param
    if isinstance(param, PackedArray):
        rows = (part.reshape(-1, part.shape[-1]) for part in (param.packed, param.scales))
        return unpack(*rows).reshape(param.shape)
    scales = param.scales.reshape(param.scales.shape + (1,) * (param.values.ndim - param.scales.ndim))
    return param.values.astype(jnp.float32) * scales


@pytest.mark.parametrize(
    ("name", "num_shards", "spreads_experts"),
    [
        pytest.param("qwen3_bias", 1, False, marks=pytest.mark.exhaustive),
        ("gemma3", 8, False),
        pytest.param("qwen2_moe_all", 8, False, marks=pytest.mark.exhaustive),
        ("gpt_oss", 4, True),
        ("lfm2_moe", 4, True),
    ],
)
def test_logits_are_those_of_the_rounded_weights(name, num_shards, spreads_experts, tmp_path):
    write_checkpoint(name, tmp_path)
    rounded = PagedModel(tmp_path, num_shards, quantization="int8", spreads_experts=spreads_experts)
    exact = PagedModel(tmp_path)
    exact.params = jax.tree.map(written_out, PagedModel(tmp_path, quantization="int8").params, is_leaf=is_quantized)
    assert rounded.params.layers[0].mlp.up_proj.weight.values.dtype == jnp.int8
    expected, logits = exact.logits(prompt_of(name)), rounded.logits(prompt_of(name))
    # Activations have 16 bits: an error of 1e-5 of the largest in each product, a few products deep.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    assert rounded.continue_greedily(logits[-1], 2) == exact.continue_greedily(expected[-1], 2)


PACKED = [("wide", 1), ("wide", 8), ("qwen2_moe", 1), ("gpt_oss", 4), ("wide_lfm2", 2)]
WIDE_LFM2 = {**CONFIGS["lfm2"], "hidden_size": 128, "intermediate_size": 384, "block_multiple_of": 128}


@pytest.mark.parametrize(("name", "num_shards"), PACKED)
def test_logits_are_those_of_the_packed_weights(name, num_shards, tmp_path, monkeypatch):
    monkeypatch.setitem(CONFIGS, "wide", WIDE)
    monkeypatch.setitem(CONFIGS, "wide_lfm2", WIDE_LFM2)
    write_checkpoint(name, tmp_path)
    packed = PagedModel(tmp_path, num_shards, quantization="int4")
    exact = PagedModel(tmp_path)
    exact.params = jax.tree.map(written_out, PagedModel(tmp_path, quantization="int4").params, is_leaf=is_quantized)
    assert isinstance(packed.params.layers[1].self_attn.q_proj.weight, PackedArray)
    expected, logits = exact.logits(prompt_of(name)), packed.logits(prompt_of(name))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    assert packed.continue_greedily(logits[-1], 2) == exact.continue_greedily(expected[-1], 2)
