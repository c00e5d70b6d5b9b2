"""Pixtral's tower and Mistral 3's projector; results are held to transformers in `tests/models/test_seeing.py`."""

import jax
import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.pixtral import pack
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
