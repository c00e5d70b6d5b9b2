"""Gemma 4's tower; results are held to transformers in `tests/models/test_seeing.py`."""

import numpy as np
import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.interface import WINDOWS, encode_sizes
from tests.models.gemma4_checkpoints import GEMMA4_SEEING, VISION
from tests.models.seeing_checkpoints import pictures_of
from tests.models.vision.test_gemma3 import SeeingTower, golden_embeds

NAME, BOTH_WAYS = GEMMA4_SEEING


@pytest.mark.parametrize(("num_shards", "splits_items"), [(2, False), (4, True)])
def test_devices_share_heads_or_patches(num_shards, splits_items, tmp_path):
    tower, expected = SeeingTower(NAME, tmp_path, num_shards, splits_items), golden_embeds(NAME)
    embeds_EX = tower(pictures_of(NAME), 180)[: len(expected["sums"])]
    np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(embeds_EX[:, 0], expected["first"], rtol=1e-4, atol=1e-5)


def test_tokens_see_both_ways_where_config_json_says_so_and_buckets_hold_whole_embeddings():
    towers = [model_for(hf).config_from_hf(hf).vision for hf in GEMMA4_SEEING.values()]
    assert [tower.both_ways for tower in towers] == ["", WINDOWS]
    assert encode_sizes(towers[0], 2520) == (261, 1026, 2520)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 2}, "4 heads of 8 numbers and 2 key heads"),
        ({"model_type": "siglip"}, "model_type is 'siglip'; supported: gemma4_vision"),
        ({"attention_bias": True}, "or attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
        ({"pixel_shuffle": 3}, "pixel_shuffle is 3. Nothing is known of this field"),
    ],
)
def test_a_tower_that_is_not_understood_is_refused(changes, words):
    with pytest.raises(CheckpointError, match=words):
        model_for({**GEMMA4_SEEING[NAME], "vision_config": {**VISION, **changes}})
