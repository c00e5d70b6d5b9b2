"""Gemma 3's tower and projector against what transformers computed."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.interface import encode_sizes
from jaxpaged.params.checkpoint import load_params
from jaxpaged.params.quantized import quantized_specs
from tests.models.seeing import SeeingTower, golden_embeds
from tests.models.seeing_checkpoints import (
    SEEING,
    SIGLIP,
    make_seeing_tensors,
    pictures_of,
)

NAMES = ["gemma3_seeing", "gemma3_seeing_long_window"]


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_are_those_of_transformers(name, tmp_path):
    tower, expected = SeeingTower(name, tmp_path), golden_embeds(name)
    embeds_EX = tower(pictures_of(name), 4)
    np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(embeds_EX[:, 0], expected["first"], rtol=1e-4, atol=1e-5)


def test_an_embedding_does_not_depend_on_the_batch(tmp_path):
    tower = SeeingTower(NAMES[0], tmp_path)
    one, two, three = pictures_of(NAMES[0])
    together = tower([one, two, three], 4)
    np.testing.assert_allclose(tower([three], 4)[:16], together[48:], rtol=1e-5, atol=1e-6)
    part = (two[0][1:], (1, 4, 4))
    np.testing.assert_allclose(tower([part], 1), together[32:48], rtol=1e-5, atol=1e-6)


# Four heads: two devices have two each, four have one, eight have all of them.
@pytest.mark.parametrize(("num_shards", "splits_items"), [(2, False), (4, False), (8, False), (4, True)])
def test_devices_share_heads_or_items(num_shards, splits_items, tmp_path):
    name = NAMES[0]
    tower, expected = SeeingTower(name, tmp_path, num_shards, splits_items), golden_embeds(name)
    embeds_EX = tower(pictures_of(name), 4)
    np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=1e-4)
    weight = tower.params.vision.tower.layers[0].self_attn.q_proj.weight
    heads = 4 if splits_items or num_shards == 8 else 4 // num_shards
    assert weight.sharding.shard_shape(weight.shape) == (heads, 8, 32)
    if splits_items:
        packed = tower.model.vision.pack(tower.config.vision, pictures_of(name), 4)
        text = tower.encode.lower(tower.params.vision, packed).compile().as_text()
        assert not re.findall(r"= \S+ (?:all-reduce|all-gather|all-to-all|collective-permute)", text)


def test_bfloat16_is_near(tmp_path):
    name = NAMES[0]
    embeds_EX, expected = SeeingTower(name, tmp_path, dtype=jnp.bfloat16)(pictures_of(name), 4), golden_embeds(name)
    scale = np.abs(expected["first"]).max()
    assert np.abs(embeds_EX[:, 0] - expected["first"]).max() < 0.05 * scale


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_towers_are_not_quantised(method):
    hf = {**SEEING[NAMES[0]], "text_config": {**SEEING[NAMES[0]]["text_config"], "intermediate_size": 128}}
    model = model_for(hf)
    config = model.config_from_hf(hf)
    specs = quantized_specs(model.param_specs(config, 1), method, config.dim_sizes())
    assert not any(spec.quantized for spec in jax.tree.leaves(specs.vision))
    assert any(spec.quantized == method for spec in jax.tree.leaves(specs.decoder))


@pytest.mark.parametrize("only_text", [False, True])
def test_published_names_are_read_and_a_tower_may_stay_on_disk(only_text, tmp_path, caplog):
    name, hf = NAMES[0], SEEING[NAMES[0]]
    published = {"model.vision_tower.": "vision_tower.vision_model.", "model.multi_modal_projector.": ""}
    published |= {"model.language_model.": "language_model.model."}
    tensors = {}
    for tensor, array in make_seeing_tensors(name).items():
        prefix = next(prefix for prefix in published if tensor.startswith(prefix))
        tensors[tensor.replace(prefix, published[prefix] or "multi_modal_projector.")] = array
    tensors["vision_tower.vision_model.head.probe"] = np.zeros((1, 1, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    model = model_for(hf, language_model_only=only_text)
    config = model.config_from_hf(hf)
    params = load_params(model.param_specs(config, 1), config, tmp_path, make_mesh(1), jnp.float32)
    assert (model.vision is None, config.vision is None) == (only_text, only_text)
    assert ("tensors that read images are left out" in caplog.text) == only_text
    decoder = params if only_text else params.decoder
    np.testing.assert_array_equal(decoder.embed_tokens, tensors["language_model.model.embed_tokens.weight"])
    if not only_text:
        projection = np.asarray(params.vision.input_projection.weight)
        np.testing.assert_array_equal(projection.T, tensors["multi_modal_projector.mm_input_projection_weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9; .* divisor of 8"),
        ({"vision_config": {**SIGLIP, "num_attention_heads": 5}}, "5 heads, which do not divide hidden_size 32"),
        ({"vision_config": {**SIGLIP, "hidden_act": "swish2"}}, "hidden_act is 'swish2'"),
        ({"vision_config": {**SIGLIP, "num_channels": 4}}, "num_channels"),
        ({"vision_config": {**SIGLIP, "window": 3}}, "window is 3. Nothing is known of this field"),
        ({"vision_config": 5}, "vision_config is 5; it must be an object"),
    ],
)
def test_a_tower_that_is_not_understood_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        model_for({**SEEING[NAMES[0]], **changes})


def test_sizes_are_cut_to_the_largest_picture():
    config = model_for(SEEING[NAMES[0]]).config_from_hf(SEEING[NAMES[0]]).vision
    assert [encode_sizes(config, largest) for largest in (1, 3, 5, 60)] == [(1,), (1, 2, 3), (1, 2, 4, 5), (1, 2, 4, 8)]
    patches = dataclasses.replace(config, item_pixels=None, patches_per_embed=4)
    assert encode_sizes(patches, 1001) == (256, 1004)
    assert encode_sizes(patches, 20_000) == (256, 1024, 4096, 16_384, 20_000)
    assert (patches.size_of((1, 3, 5)), patches.num_embeds(1024)) == (60, 256)
