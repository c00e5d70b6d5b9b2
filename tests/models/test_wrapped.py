"""The language model of a checkpoint whose tower stays on disk."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.distributed.mesh import make_mesh
from jaxpaged.errors import CheckpointError
from jaxpaged.models.registry import model_for
from jaxpaged.params.checkpoint import load_params
from tests.models.checkpoints import CONFIGS, make_tensors, write_checkpoint
from tests.params.test_checkpoint import load

# The text model in a wrapper -> the wrapper, what its names begin with, names of tensors that read images.
WRAPPED = {
    "llama4": (
        "Llama4ForConditionalGeneration",
        "language_model.",
        ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"],
    ),
    "deepseek_v3": (
        "KimiK25ForConditionalGeneration",
        "language_model.",
        ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"],
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        "language_model.",
        ["model.vision_tower.patch_embedder.input_proj.weight", "model.embed_vision.embedding_projection.weight"],
    ),
    **dict.fromkeys(
        ("mistral_window", "ministral3", "mistral4"),
        (
            "Mistral3ForConditionalGeneration",
            "language_model.",
            ["vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"],
        ),
    ),
}
BESIDE = {
    "vision_config": {"hidden_size": 8},
    "media_placeholder_token_id": 5,
    "image_token_index": 5,
    "spatial_merge_size": 2,
    "projector_hidden_act": "gelu",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_the_language_model_of_a_wrapper_is_loaded_alone(name, tmp_path, caplog):
    architecture, prefix, of_images = WRAPPED[name]
    text = {field: value for field, value in CONFIGS[name].items() if field != "architectures"}
    hf = {"architectures": [architecture], "model_type": "wrapper", "text_config": text, **BESIDE}
    hf["tie_word_embeddings"] = text["tie_word_embeddings"]
    tensors = {prefix + tensor: array for tensor, array in make_tensors(name).items()}
    tensors |= {tensor: np.zeros(3, np.float32) for tensor in of_images}
    (tmp_path / "wrapped").mkdir()
    save_file(tensors, tmp_path / "wrapped" / "model.safetensors")
    model = model_for(hf, language_model_only=True)
    config = model.config_from_hf(hf)
    params = load_params(model.param_specs(config, 1), config, tmp_path / "wrapped", make_mesh(1), jnp.float32)
    assert f"{len(of_images)} tensors that read images are left out" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, params, load(name, write_checkpoint(name, tmp_path / "text")))


def test_a_mistral_3_of_another_kind_is_refused():
    hf = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral5"}}
    with pytest.raises(CheckpointError, match="model_type of text_config is 'mistral5'"):
        model_for(hf).config_from_hf(hf)
