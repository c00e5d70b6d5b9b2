"""Which model may draft for which: found out before any weight is read."""

import json
import shutil
from functools import partial

import jax
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.config.hf_overrides import overridden
from jaxpaged.engine.build import check_same_tokens, read_model, resolve_model, with_draft_model
from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.params.checkpoint import check_entries, entries_of_folder
from jaxpaged.params.hub import EMBEDDED_FOLDER
from tests.models.checkpoints import write_checkpoint
from tests.models.draft_heads import TAPS_KEY, write_eagle3, write_mimo


def drafted_by(draft, tmp_path, **options):
    """What becomes of a tiny Llama, of 211 tokens and 128 positions, with a draft model."""
    folders = [tmp_path / "model", tmp_path / "draft"]
    for folder, name in zip(folders, ("llama", draft)):
        folder.mkdir()
        write_checkpoint(name, folder)
    speculation = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 2}
    config = EngineConfig.from_options(model=str(folders[0]), speculative_config=speculation, **options)
    model, decoder = read_model(folders[0])
    return with_draft_model(config, model, decoder, folders[0]), folders[1]


def test_a_model_with_the_same_vocabulary_may_draft(tmp_path):
    model, folder = drafted_by("gemma3", tmp_path)
    assert model.draft.folder == folder and model.draft.config.architecture == "Gemma3ForCausalLM"


def test_a_model_with_another_vocabulary_may_not(tmp_path):
    with pytest.raises(ConfigError, match=r"draft knows 223 tokens, and .*model 211\. Choose"):
        drafted_by("qwen3", tmp_path)


def test_a_model_for_fewer_positions_may_draft_for_shorter_texts_only(tmp_path):
    with pytest.raises(ConfigError, match=r"made for 64 positions, and max_model_len is 128\. Lower"):
        drafted_by("llama_longrope", tmp_path)


def headed_by(tmp_path, **changes):
    """What becomes of a tiny Llama with a head that drafts."""
    folder, head = write_checkpoint("llama", tmp_path / "model"), write_eagle3(tmp_path / "head", **changes)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2}
    config = EngineConfig.from_options(model=str(folder), speculative_config=speculation)
    return with_draft_model(config, *read_model(folder), folder)


def test_a_head_says_what_it_reads_and_what_it_knows(tmp_path):
    config = headed_by(tmp_path / "a", has_embeddings=True, norm_before_residual=True).draft.config
    assert (config.taps, config.draft_vocab_size, config.vocab_size) == ((0, 1, 2), 150, 211)
    assert config.has_embeddings and config.norm_before_residual
    inner = {"eagle_config": {TAPS_KEY: [2, 0, 1], "use_aux_hidden_state": True}, TAPS_KEY: None}
    config = headed_by(tmp_path / "b", draft_vocab_size=211, **inner).draft.config
    assert config.taps == (2, 0, 1) and not config.has_embeddings and not config.maps_tokens


OF_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    TAPS_KEY: [0, 1, 2],
}


@pytest.mark.parametrize(
    ("layout", "norm_before_residual"),
    [
        ({"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float16", TAPS_KEY: [0, 1, 2]}, False),
        ({"eagle_config": OF_MODELOPT, TAPS_KEY: None, "has_embeddings": True}, False),
        ({"speculators": True, "has_embeddings": True, "norm_before_residual": False}, False),
        ({"speculators": True, "target_hidden_size": None}, True),
    ],
    ids=["authors", "modelopt", "speculators", "speculators, defaults"],
)
def test_published_layouts_are_read(layout, norm_before_residual, tmp_path):
    """Of the description and, by name and shape, of the tensors."""
    draft = headed_by(tmp_path, **layout)
    draft, config = draft.draft, draft.draft.config
    assert (config.taps, config.draft_vocab_size, config.hidden_size) == ((0, 1, 2), 150, 48)
    assert config.norm_before_residual == norm_before_residual
    assert config.has_embeddings == layout.get("has_embeddings", False)
    specs = jax.tree.leaves(draft.model.param_specs(config, 1))
    check_entries(specs, entries_of_folder(draft.folder), config, draft.folder)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"speculators": True, "hidden_act": "tanh"}, CheckpointError, "hidden_act is 'tanh'"),
        ({"eagle_config": {"use_last_layernorm": False}}, CheckpointError, "use_last_layernorm is False; only True"),
        ({"eagle_config": {"layer_type": 3}}, CheckpointError, "eagle_config.layer_type is 3; nothing is known of it"),
        ({"norm_before_fc": True}, CheckpointError, "norm_before_fc is True. Nothing is known"),
        ({"speculators_model_type": "dflash"}, CheckpointError, "speculators_model_type is 'dflash'"),
        ({"vocab_size": 300}, ConfigError, r"head knows 300 tokens, and .*model 211\. Choose"),
        ({"target_hidden_size": 64}, ConfigError, "made for a model of width 64, and this one has 48"),
        ({"hidden_size": 32}, ConfigError, "has a width of 32 and no embeddings"),
        ({"num_hidden_layers": 2}, CheckpointError, "num_hidden_layers is 2; an EAGLE-3 head has 1"),
        ({TAPS_KEY: None}, CheckpointError, r"is \[2, 1, -1\]; it must name 3 of the decoder's 2 layers"),
        ({TAPS_KEY: [1, 2]}, CheckpointError, r"is \[1, 2\]; it must name 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, CheckpointError, "use_aux_hidden_state is False"),
        ({"logit_scale": 0.5}, CheckpointError, "logit_scale is 0.5"),
    ],
)
def test_a_head_of_another_model_or_kind_is_refused(changes, error, message, tmp_path):
    changes = {"target_hidden_size": 48} | changes
    with pytest.raises(error, match=message):
        headed_by(tmp_path, **changes)


@pytest.mark.parametrize(("name", "count"), [("llama", 0), ("mimo", 2)])
def test_a_model_without_a_layer_that_predicts_further_is_refused(name, count, tmp_path):
    write = write_mimo if name == "mimo" else partial(write_checkpoint, name)
    folder = write(tmp_path, **{"num_nextn_predict_layers": 2} if count else {})
    speculation = {"method": "mimo_mtp", "num_speculative_tokens": 2}
    config = EngineConfig.from_options(model=str(folder), speculative_config=speculation)
    with pytest.raises(ConfigError, match=f"has {count} layers that predict further tokens; it takes 1"):
        with_draft_model(config, *read_model(folder), folder)


def test_tokenizers_that_give_tokens_other_ids_are_told_apart(tmp_path):
    draft = shutil.copytree(EMBEDDED_FOLDER, tmp_path / "draft", ignore=shutil.ignore_patterns("*.safetensors"))
    check_same_tokens(EMBEDDED_FOLDER, draft)
    file = draft / "tokenizer.json"
    parsed = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(parsed, indent=1), encoding="utf-8")
    check_same_tokens(EMBEDDED_FOLDER, draft)
    vocabulary = parsed["model"]["vocab"]
    first, second, *_ = [token for token, token_id in vocabulary.items() if token_id > 300]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(parsed), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"another tokenizer: 2 of 2048 tokens have another id"):
        check_same_tokens(EMBEDDED_FOLDER, draft)
    file.unlink()
    check_same_tokens(EMBEDDED_FOLDER, draft)


def test_without_drafts_a_model_is_what_it_was():
    model, decoder = read_model(EMBEDDED_FOLDER)
    assert with_draft_model(EngineConfig.from_options(), model, decoder, EMBEDDED_FOLDER) is model


# ---- hf_overrides


def test_fields_of_config_json_may_be_replaced_at_any_depth(tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model")
    plain = read_model(folder)[1]
    changed = read_model(folder, {"rope_theta": 123.0, "max_position_embeddings": 64})[1]
    assert changed.max_position_embeddings == 64 and changed.layers[0].rope != plain.layers[0].rope
    inner = overridden({"text_config": {"a": 1, "b": 2}, "c": 3}, {"text_config": {"b": None}, "d": {"e": 4}})
    assert inner == {"text_config": {"a": 1, "b": None}, "c": 3, "d": {"e": 4}}


def test_an_engine_is_resolved_with_what_replaces_fields(tmp_path):
    folder = write_checkpoint("llama", tmp_path / "model")
    options = EngineConfig.from_options(
        model=str(folder), hf_overrides={"max_position_embeddings": 96, "head_dtype": "float32"}
    )
    _, _, decoder, config = resolve_model(options)
    assert config.max_model_len == decoder.max_position_embeddings == 96


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"no_such_field": 5}, "hf_overrides sets no_such_field. With that, config.json: no_such_field is 5. Nothing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be a positive whole number"),
        ({"eos_token_id": 3}, "hf_overrides sets eos_token_id, which it cannot. Use override_generation_config"),
        ({"head_dtype": "bfloat16"}, "hf_overrides sets head_dtype 'bfloat16', but logits are float32 sums always"),
        ({"id2label": {"0": "a"}}, "hf_overrides sets id2label"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuch"),
    ],
)
def test_a_field_that_cannot_be_replaced_is_refused(tmp_path, overrides, said):
    with pytest.raises(ConfigError, match=said):
        read_model(write_checkpoint("llama", tmp_path / "model"), overrides)
