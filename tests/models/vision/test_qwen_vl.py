"""The towers of Qwen's VL models against what transformers computed, and what the host computes of sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.models.vision.qwen_packing import ORDER, PICTURES, WINDOWS
from jaxpaged.models.vision.rope_offsets import rope_offsets
from jaxpaged.params.checkpoint import load_params
from tests.models.qwen_vl_checkpoints import QWEN_VL, TOWER_2_5, TOWER_3
from tests.models.seeing import Feature, SeeingTower, golden_embeds
from tests.models.seeing_checkpoints import SEEING, make_seeing_tensors, pictures_of

BOUNDS = np.cumsum([0, 15, 2, 12])
"""Of the embeddings of the three pictures."""


@pytest.mark.parametrize("name", QWEN_VL)
def test_embeddings_are_those_of_transformers_in_every_bucket(name, tmp_path):
    tower, expected = SeeingTower(name, tmp_path), golden_embeds(name)
    for size in (116, 256):
        embeds_EX = tower(pictures_of(name), size)[:29]
        np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(embeds_EX[:, 0], expected["first"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_an_embedding_does_not_depend_on_the_batch(name, tmp_path):
    tower, pictures = SeeingTower(name, tmp_path), pictures_of(name)
    together = tower(pictures, 128)
    for order in ([2], [1, 0]):
        alone = tower([pictures[i] for i in order], 128)
        expected = np.concatenate([together[BOUNDS[i] : BOUNDS[i + 1]] for i in order])
        np.testing.assert_allclose(alone[: len(expected)], expected, rtol=1e-5, atol=1e-5)


# Four heads and 44 columns: two and four devices share them, eight have all of the weights.
@pytest.mark.parametrize(
    ("name", "num_shards", "splits_items"),
    [("qwen3_vl", 2, False), ("qwen2_5_vl", 4, False), ("qwen3_vl", 8, False), ("qwen2_5_vl", 4, True)],
)
def test_devices_share_heads_or_patches(name, num_shards, splits_items, tmp_path):
    tower, expected = SeeingTower(name, tmp_path, num_shards, splits_items), golden_embeds(name)
    embeds_EX = tower(pictures_of(name), 128)[:29]
    np.testing.assert_allclose(embeds_EX.sum(1), expected["sums"], rtol=1e-4, atol=2e-4)
    weight = tower.params.vision.layers[0].attn.q_proj.weight
    heads = 4 if splits_items or num_shards == 8 else 4 // num_shards
    assert weight.sharding.shard_shape(weight.shape) == (heads, 8, 32)
    if splits_items:
        packed = tower.model.vision.pack(tower.config.vision, pictures_of(name), 128)
        text = tower.encode.lower(tower.params.vision, packed).compile().as_text()
        assert "f32[32,32]" in text  # the vectors of a device's patches


def test_bfloat16_is_near(tmp_path):
    name = "qwen3_vl"
    embeds_EX = SeeingTower(name, tmp_path, dtype=jnp.bfloat16)(pictures_of(name), 128)[:29]
    expected = golden_embeds(name)["first"]
    assert np.abs(embeds_EX[:, 0] - expected).max() < 0.05 * np.abs(expected).max()


def test_patches_of_a_window_are_neighbours():
    """In the second picture there is one row, so its windows are cut."""
    model = model_for(SEEING["qwen2_5_vl"])
    config = model.config_from_hf(SEEING["qwen2_5_vl"]).vision
    picture = lambda rows, columns: (np.zeros((rows * columns * 4, 48), np.uint8), (1, rows, columns))
    packed = model.vision.pack(config, [picture(3, 3), picture(1, 3)], 52)
    windows = [0] * 16 + [1] * 8 + [2] * 8 + [3] * 4 + [4] * 8 + [5] * 4
    assert packed[WINDOWS].tolist() == windows + [6, 7, 8, 9]
    assert packed[PICTURES].tolist() == [0] * 36 + [1] * 12 + [2, 3, 4, 5]
    assert packed[ORDER].tolist() == [0, 1, 4, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]


def test_positions_of_pictures_and_of_what_is_behind_them():
    features = [Feature(2, [(2, 6)], (1, 2, 3)), Feature(9, [(9, 2)], (1, 2, 1)), Feature(11, [(11, 2)], (1, 1, 2))]
    offsets, delta = rope_offsets(features, 14)
    positions = offsets + np.arange(14)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 8, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 8, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9, 10],
    ]
    assert delta == -3
    assert offsets.dtype == np.int32
    assert rope_offsets([], 3)[0].tolist() == [[0] * 3] * 3
    of_frames = [Feature(1, [(1, 2), (4, 2)], (2, 1, 2))]
    assert (rope_offsets(of_frames, 7)[0][2] + np.arange(7)).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert rope_offsets(features[:1], 8)[1] == -3  # the prompt ends with a picture


def test_moments_of_a_video_begin_at_one_position():
    """The text behind them goes on behind the last moment, where that is later than the longer side."""
    moments = [Feature(1 + 2 * i, [(1 + 2 * i, 2)], (1, 1, 2), i, time) for i, time in enumerate((0, 0, 5))]
    offsets, delta = rope_offsets(moments, 9)
    assert (offsets + np.arange(9)).tolist() == [
        [0, 1, 1, 1, 1, 6, 6, 7, 8],
        [0, 1, 1, 1, 1, 1, 1, 7, 8],
        [0, 1, 2, 1, 2, 1, 2, 7, 8],
    ]
    assert delta == 0
    assert rope_offsets(moments[:2], 9)[1] == -2  # both positions in time are the same


@pytest.mark.parametrize("only_text", [False, True])
def test_published_names_are_read_and_a_tower_may_stay_on_disk(only_text, tmp_path):
    name, hf = "qwen2_5_vl", SEEING["qwen2_5_vl"]
    published = {"model.visual.": "visual.", "model.language_model.": "model.", "lm_head.": "lm_head."}
    tensors = {}
    for tensor, array in make_seeing_tensors(name).items():
        prefix = next(prefix for prefix in published if tensor.startswith(prefix))
        tensors[tensor.replace(prefix, published[prefix])] = array
    save_file(tensors, tmp_path / "model.safetensors")
    model = model_for(hf, language_model_only=only_text)
    config = model.config_from_hf(hf)
    params = load_params(model.param_specs(config, 1), config, tmp_path, make_mesh(1), jnp.float32)
    assert (model.vision is None, config.vision is None) == (only_text, only_text)
    if not only_text:
        keys = np.asarray(params.vision.layers[2].attn.k_proj.weight).reshape(32, 32)
        np.testing.assert_array_equal(keys, tensors["visual.blocks.2.attn.qkv.weight"][32:64])


def test_a_tower_without_levels_is_one_of_plain_embeddings():
    config = model_for(SEEING["qwen3_vl_yarn"]).config_from_hf(SEEING["qwen3_vl_yarn"])
    assert (config.vision.num_levels, config.vision.embed_numbers, config.tie_embeddings) == (0, 48, True)
    assert config.layers[0].rope.mixes_sections
    specs = model_for(SEEING["qwen3_vl_yarn"]).param_specs(config, 1)
    assert not any("deepstack" in spec.hf_name for spec in jax.tree.leaves(specs))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen2_5_vl", {**TOWER_2_5, "num_heads": 5}, "5 heads for a width of 32"),
        ("qwen2_5_vl", {**TOWER_2_5, "out_hidden_size": 48}, "embeddings of 48 numbers, but hidden_size .* is 64"),
        ("qwen2_5_vl", {**TOWER_2_5, "window_size": 7}, "window_size of vision_config is 7"),
        ("qwen2_5_vl", {**TOWER_2_5, "fullatt_block_indexes": [3]}, r"fullatt_block_indexes of vision_config is \[3\]"),
        ("qwen3_vl", {**TOWER_3, "deepstack_visual_indexes": 1}, "deepstack_visual_indexes of vision_config is 1"),
        ("qwen3_vl", {**TOWER_3, "num_position_embeddings": 24}, "num_position_embeddings of vision_config is 24"),
        ("qwen3_vl", {**TOWER_3, "in_channels": 4}, "in_channels of vision_config is 4"),
        ("qwen3_vl", {**TOWER_3, "registers": 4}, "registers is 4. Nothing is known of this field"),
        ("qwen3_vl", 5, "vision_config is 5; it must be an object"),
    ],
)
def test_a_tower_that_is_not_understood_is_refused(name, changes, words):
    with pytest.raises(CheckpointError, match=words):
        model_for({**SEEING[name], "vision_config": changes})


PUBLISHED_2_5 = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def test_the_description_of_a_published_model_is_understood():
    config = model_for(PUBLISHED_2_5).config_from_hf(PUBLISHED_2_5)
    tower, rope = config.vision, config.layers[0].rope
    assert (config.max_position_embeddings, config.qkv_bias, rope.theta) == (128_000, True, 1e6)
    assert (rope.rope_type, rope.sections, rope.mixes_sections) == ("default", (16, 24, 24), False)
    assert (tower.window, tower.longest_window, tower.head_dim, tower.embed_numbers) == (4, 64, 80, 3584)
    assert [tower.splits(num_shards) for num_shards in (4, 8)] == [True, False]  # of 3420 columns
