"""Pixtral's tower and Mistral 3's projector; results are held to transformers in `tests/models/test_seeing.py`."""

import jax
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.parts import pack_patches as pack
from jaxpaged.params.quantized import quantized_specs
from tests.models.pixtral_checkpoints import MISTRAL3, VISION
from tests.models.seeing_checkpoints import pictures_of
from tests.models.vision.test_gemma3 import SeeingTower, golden_embeds

NAME = "mistral3"


@pytest.mark.parametrize(("num_shards", "splits_items"), [(1, False), (2, False), (4, True)])
def test_devices_share_heads_or_patches(num_shards, splits_items, tmp_path):
    tower, expected = SeeingTower(NAME, tmp_path, num_shards, splits_items), golden_embeds(NAME)
    embeds_EX = tower(pictures_of(NAME), 128)[: len(expected["sums"])]
    np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(embeds_EX[:, 0], expected["first"], rtol=1e-4, atol=1e-5)
    weight = tower.params.vision.layers[0].attention.q_proj.weight
    assert weight.sharding.shard_shape(weight.shape) == (4 if splits_items else 4 // num_shards, 8, 32)


def test_patches_know_their_place_and_their_picture():
    config = model_for(MISTRAL3).config_from_hf(MISTRAL3).vision
    pixels, grid = pictures_of(NAME)[0]
    arrays = pack(config, [(pixels, grid), (pixels[:4], (1, 1, 1))], 32)
    places = arrays["positions"][:24].reshape(2, 3, 2, 2, 2)
    assert np.array_equal(places[1, 2], [[[2, 4], [2, 5]], [[3, 4], [3, 5]]])
    assert arrays["positions"][24:28].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert arrays["pictures"].tolist() == [0] * 24 + [1] * 4 + [2, 3, 4, 5]
    assert np.array_equal(arrays["pixels"][24:28], pixels[:4]) and not arrays["pixels"][28:].any()


def test_no_matrix_of_a_tower_is_quantised():
    model = model_for(MISTRAL3)
    config = model.config_from_hf(MISTRAL3)
    specs = quantized_specs(model.param_specs(config, 1), "int8", config.dim_sizes())
    assert not any(spec.quantized for spec in jax.tree.leaves(specs.vision))


PIXTRAL_12B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_seq_length": 1,
    "image_token_index": 10,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "is_composition": True,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "is_composition": True,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


def test_pixtral_12b_is_a_llava_with_this_tower():
    model = model_for(PIXTRAL_12B)
    config = model.config_from_hf(PIXTRAL_12B)
    tower = config.vision
    assert (tower.width, tower.num_layers, tower.num_heads, tower.out_width) == (1024, 24, 16, 5120)
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (32, 8, 14336)
    assert (tower.merge, tower.patches_per_embed, tower.projector_bias) == (1, 1, True)
    names = {spec.hf_name for spec in jax.tree.leaves(model.param_specs(config, 1).vision)}
    assert "multi_modal_projector.linear_1.bias" in names and "multi_modal_projector.norm.weight" not in names
    assert model_for(PIXTRAL_12B, language_model_only=True).config_from_hf(PIXTRAL_12B).hidden_size == 5120
    with pytest.raises(CheckpointError, match="vision_feature_select_strategy is 'default'"):
        model_for({**PIXTRAL_12B, "vision_feature_select_strategy": "default"})
    with pytest.raises(CheckpointError, match="LlavaForConditionalGeneration, a model that also reads images"):
        model_for({**PIXTRAL_12B, "vision_config": {"model_type": "clip_vision_model"}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {**VISION, "head_dim": 16}}, "4 heads of 16 numbers for a width of 32"),
        ({"vision_config": {**VISION, "model_type": "clip"}}, "model_type is 'clip'; supported: pixtral"),
        ({"vision_config": {**VISION, "num_channels": 1}}, "num_channels of vision_config is not 3"),
        ({"vision_feature_layer": -2}, "vision_feature_layer not -1"),
        ({"vision_config": {**VISION, "window": 3}}, "window is 3. Nothing is known of this field"),
        ({"vision_config": {**VISION, "rope_parameters": {"rope_type": "yarn"}}}, "rope_type is 'yarn'"),
        ({"vision_config": {**VISION, "rope_parameters": 7}}, "rope_parameters is 7"),
        ({"projector_hidden_act": "swish2"}, "projector_hidden_act is 'swish2'"),
    ],
)
def test_a_tower_that_is_not_understood_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        model_for({**MISTRAL3, **changes})
