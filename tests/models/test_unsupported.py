"""What people have that is not supported is said in one sentence or two, with what would serve now."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.errors import CheckpointError
from jaxpaged.models.config import load_hf_config
from jaxpaged.models.registry import MODELS, model_for
from jaxpaged.params.checkpoint import entries_of_folder
from tests.models.checkpoints import CONFIGS, write_checkpoint
from tests.models.draft_heads import EAGLE3, as_speculators
from tests.params.test_checkpoint import load

LLAMA, GPT_OSS = CONFIGS["llama"], CONFIGS["gpt_oss"]


def refusal(hf):
    with pytest.raises(CheckpointError) as caught:
        model_for(hf).config_from_hf(hf)
    return plain_words(caught)


def plain_words(caught):
    """What an error says, if it is short, holds no dump, and names the command that lists models."""
    words = str(caught.value)
    assert len(words) < 520 and "{" not in words and "\n" not in words
    assert sum(name in words for name in MODELS) <= 1
    assert "jaxpaged models --supported" in words
    return words


QUANTISED = {
    "bitsandbytes to 4 bits": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes to 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
    "FBGEMM FP8 to 8 bits": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "HQQ": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}},
    "AQLM": {"quant_method": "aqlm"},
    "Quanto": {"quant_method": "quanto", "weights": "int4"},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
    "AutoRound to 4 bits": {"quant_method": "auto-round", "bits": 4},
    "ExLlamaV2": {"quant_method": "exl2", "bits": 4.5},
    "MLX to 4 bits": {"group_size": 64, "bits": 4, "mode": "affine"},
    "something new": {"quant_method": "something new"},
    "an unnamed method": {"compression": [1]},
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_checkpoints_are_refused_by_the_name_of_their_method(kind):
    words = refusal({**LLAMA, "quantization_config": QUANTISED[kind]})
    assert re.search(f"the weights were quantised with .*{kind}", words) and "not supported yet" in words
    assert f"16-bit version of the model with --quantization {'int8' if '8 bits' in kind else 'int4'}," in words


def test_the_mlx_field_alone_says_so_too():
    assert "quantised with MLX to 4 bits" in refusal({**LLAMA, "quantization": {"group_size": 64, "bits": 4}})
    assert "HQQ" in refusal({**GPT_OSS, "quantization_config": QUANTISED["HQQ"]})


def test_mimo_with_fused_heads_is_refused_with_the_reason():
    """Though it reads pictures and sound, too."""
    words = refusal({"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "vision_config": {"depth": 28}})
    assert "one matrix, cut for several devices" in words and "GGUF" in words


@pytest.mark.parametrize("end", ["qweight", "weight_packed"])
def test_quantised_tensors_without_a_description_are_recognised(end, tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    save_file({f"model.layers.0.self_attn.q_proj.{end}": np.zeros((6, 6), np.int32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load("llama", folder)
    assert f"holds quantised weights (model.layers.0.self_attn.q_proj.{end})" in plain_words(caught)


# ---- architectures: what config.json says, and what the error says that it is, and what would serve
SEEING = {
    "qwen 2.5 omni": (
        {
            "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
            "text_config": {"model_type": "qwen2_5_omni_text"},
            "vision_config": {"a": 1},
            "audio_config": {"a": 1},
        },
        "images and audio",
        "Qwen2ForCausalLM",
    ),
    "llava": (
        {
            "architectures": ["LlavaNextForConditionalGeneration"],
            "text_config": {"architectures": ["LlamaForCausalLM"]},
            "vision_config": {"a": 1},
        },
        "images",
        "LlamaForCausalLM",
    ),
    "internvl": (
        {
            "architectures": ["InternVLChatModel"],
            "llm_config": {"architectures": ["Qwen3ForCausalLM"]},
            "vision_config": {"a": 1},
        },
        "images",
        "Qwen3ForCausalLM",
    ),
    "phi 3 v": (
        {"architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", "img_processor": {"name": "clip"}},
        "images",
        "Phi3ForCausalLM",
    ),
    "qwen 2 audio": (
        {
            "architectures": ["Qwen2AudioForConditionalGeneration"],
            "text_config": {"model_type": "qwen2"},
            "audio_config": {"a": 1},
        },
        "audio",
        "Qwen2ForCausalLM",
    ),
    "gemma 3n": (
        {
            "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": {"model_type": "gemma3n_text"},
            "vision_config": {"a": 1},
            "audio_config": {"a": 1},
        },
        "images and audio",
        "Gemma3ForCausalLM",
    ),
    "unknown inside": (
        {
            "architectures": ["DotsForConditionalGeneration"],
            "text_config": {"model_type": "dots"},
            "vision_config": {"a": 1},
        },
        "images",
        None,
    ),
}


@pytest.mark.parametrize("kind", SEEING)
def test_wrappers_of_models_that_read_more_than_text_say_which_text_model_serves(kind):
    hf, senses, inside = SEEING[kind]
    words = refusal(hf)
    assert f"{hf['architectures'][0]}, a model that also reads {senses}. It is not supported yet" in words
    assert "Serve a model for text only" in words and (inside is None or f"of the architecture {inside}." in words)
    assert inside is not None or "architecture" not in words


@pytest.mark.parametrize("name", ["Llama4ForConditionalGeneration", "KimiK25ForConditionalGeneration"])
def test_a_tower_that_is_not_supported_can_be_left_out(name):
    words = refusal({"architectures": [name], "text_config": {}, "vision_config": {"a": 1}})
    assert f"{name}, a model that also reads images" in words and "start with --language-model-only" in words


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture FalconForCausalLM, which is not supported yet"),
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "MambaForCausalLM, which is not supported yet",
        ),
        (
            {"architectures": ["DistilBertModel"], "model_type": "bert"},
            "architecture DistilBertModel, which is not supported yet",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder with a decoder"),
        (
            {**LLAMA, "architectures": ["LlamaForTokenClassification"]},
            "LlamaForCausalLM, with layers of the same name, is",
        ),
        ({**EAGLE3}, "a head that drafts for another model. Name it in --speculative-config, with the method eagle3"),
        (as_speculators(EAGLE3), "Eagle3Speculator, a head that drafts"),
        ({"architectures": ["X" * 5000]}, "which is not supported yet"),
    ],
)
def test_other_architectures_are_named_and_no_list_follows(hf, expected):
    assert expected in refusal(hf)


# ---- folders


def adapter(folder, described=False, file="adapter_model.safetensors", **fields):
    if described:
        write_checkpoint("llama", folder)
        (folder / "model.safetensors").unlink()
    folder.mkdir(exist_ok=True)
    given = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-3.1-8B", "r": 16, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file({"base_model.model.lora_A.weight": np.zeros((2, 2), np.float32)}, folder / file)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(("kind", "said"), [("LORA", "a LoRA adapter"), ("PREFIX_TUNING", "a PREFIX_TUNING adapter")])
def test_an_adapter_is_refused_with_its_model_and_how_to_merge_both(described, file, kind, said, tmp_path):
    adapter(tmp_path / "lora", described, file, peft_type=kind)
    with pytest.raises(CheckpointError) as caught:
        load_hf_config(tmp_path / "lora")
    words = plain_words(caught)
    assert said in words and "which is meta-llama/Llama-3.1-8B" in words
    assert ("jaxpaged merge meta-llama/Llama-3.1-8B " if kind == "LORA" else "with peft (merge_and_unload") in words


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"base_model_name_or_path": null}'])
def test_an_adapter_that_says_nothing_of_itself_is_one_nevertheless(content, tmp_path):
    adapter(tmp_path / "lora")
    (tmp_path / "lora" / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_hf_config(tmp_path / "lora")
    assert "adapter_config.json) and not a whole model" in plain_words(caught)


def test_a_model_beside_which_an_adapter_lies_is_a_model(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert load_hf_config(folder)["model_type"] == "llama"
    load("llama", folder)


@pytest.mark.parametrize(
    ("file", "what"),
    [("params.json", "Meta's own tools"), ("model.onnx", "ONNX"), ("openvino_model.xml", "OpenVINO")],
)
def test_files_of_other_programs_are_recognised(file, what, tmp_path):
    for name in (file, "consolidated.00.pth"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        load_hf_config(tmp_path)
    assert f"holds a model for {what} ({file})" in plain_words(caught)


def test_a_folder_of_models_names_them(tmp_path):
    for name in ("checkpoint-100", "checkpoint-50"):
        write_checkpoint("llama", tmp_path / name)
    with pytest.raises(CheckpointError, match="2 of its folders do: checkpoint-100, checkpoint-50. Name one of them"):
        load_hf_config(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint-100"):
        entries_of_folder(tmp_path)
