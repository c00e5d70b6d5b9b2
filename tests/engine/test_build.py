"""Which model may draft for which: found out before any weight is read."""

import json
import shutil

import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.engine.build import check_same_tokens, read_model, with_draft_model
from jaxpaged.errors import ConfigError
from jaxpaged.params.hub import EMBEDDED_FOLDER
from tests.models.checkpoints import write_checkpoint


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
