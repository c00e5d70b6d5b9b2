"""What config.json and files of published encoders say."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpaged.errors import CheckpointError
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for, task_of
from jaxpaged.params.checkpoint import checked_entries
from tests.models.encoder_checkpoints import CHECKPOINTS, write

PUBLISHED = {"transformers_version": "4.33.0", "use_cache": True, "gradient_checkpointing": False, "output_past": True}


def config_of(name, **changes):
    hf = {**CHECKPOINTS[name], **PUBLISHED, **changes}
    return model_for(hf).config_from_hf(hf)


def test_places_of_roberta_begin_behind_its_padding_token():
    config = config_of("xlm_roberta_embed", max_position_embeddings=8194)
    assert (config.first_position, config.max_position_embeddings, config.num_positions) == (2, 8192, 8194)
    assert config_of("bert_embed", max_position_embeddings=512).max_position_embeddings == 512
    with pytest.raises(CheckpointError, match="the first token has place 2"):
        config_of("xlm_roberta_embed", max_position_embeddings=2)


def test_windows_of_modernbert_reach_as_far_to_both_sides():
    """As transformers 4 writes it and as transformers 5 does."""
    old, kinds = config_of("modernbert_embed", local_attention=128), ["full_attention", "sliding_attention"] * 2
    assert [layer.window for layer in old.layers] == [None, 65, 65, None]
    assert [layer.rope.theta for layer in old.layers] == [1000.0, 100.0, 100.0, 1000.0]
    ropes = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 3.0, "rope_type": "default"}}
    new = config_of("modernbert_embed", layer_types=kinds, rope_parameters=ropes)
    assert [layer.window for layer in new.layers] == [None, 5, None, 5]
    assert [layer.rope.theta for layer in new.layers] == [7.0, 3.0, 7.0, 3.0]
    assert (old.pooling_type, config_of("modernbert_classify").pooling_type) == ("CLS", "MEAN")


@pytest.mark.parametrize("changes", [{"is_decoder": True}, {"add_cross_attention": True}, {"hidden_act": "relu"}])
def test_what_would_change_the_mathematics_is_refused(changes):
    with pytest.raises(CheckpointError, match=next(iter(changes))):
        config_of("bert_embed", **changes)


def test_files_of_models_that_guess_words_are_read_for_their_layers(tmp_path):
    """With names of the first years, and with tensors that nobody needs. Others are an error."""
    write("bert_embed", tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        for new, before in old.items():
            name = name.replace(new, before)
        tensors[f"bert.{name}"] = values
    tensors["bert.embeddings.position_ids"] = np.arange(64)[None]
    tensors["cls.predictions.decoder.weight"] = np.zeros((210, 64), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    hf = {**json.loads((tmp_path / "config.json").read_text()), "architectures": ["BertForMaskedLM"]}
    assert task_of("BertForMaskedLM") == "embed"
    model = pooling_model(model_for(hf), "embed")
    config = model.config_from_hf(hf)
    checked_entries(model.param_specs(config, 1), config, tmp_path, is_whole=True)
    save_file({**tensors, "bert.more.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="more.weight"):
        checked_entries(model.param_specs(config, 1), config, tmp_path, is_whole=True)


@pytest.mark.parametrize(
    "name", ["BertForTokenClassification", "BertLMHeadModel", "XLMRobertaForCausalLM", "ModernBertDecoderForCausalLM"]
)
def test_other_heads_of_encoders_are_refused_by_name(name):
    with pytest.raises(CheckpointError, match=name):
        model_for({"architectures": [name]})
