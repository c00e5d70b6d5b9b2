"""Adapters that PEFT wrote, merged by `jaxpaged merge`, against the logits of PEFT's own models."""

import json

import numpy as np
import pytest

from jaxpaged.entrypoints.cli import main
from jaxpaged.models.pooling import pooling_model
from jaxpaged.models.registry import model_for
from jaxpaged.multimodal.processors import processor_of
from tests.models.adapted import GOLDEN, write_base
from tests.models.checkpoints import CONFIGS, prompt_of
from tests.models.paged import PagedModel, max_model_len_of
from tests.models.seeing import SeeingModel
from tests.models.seeing_checkpoints import SEEING as SEEING_CONFIGS
from tests.models.seeing_checkpoints import pictures_of, pictures_of_prompts, preprocessor_config_of, prompts_of

SEEING = ("tower", "tower_dora")
OTHERS = {*SEEING, "embeds", "classifier", "head_of_roberta", "head_of_modernbert"}
GENERATING = sorted({path.name for path in GOLDEN.iterdir()} - OTHERS)


def merged(name, tmp_path):
    """(what is recorded, the folder of the merged model)."""
    golden = json.loads((GOLDEN / name / "logits.json").read_text())
    base = write_base(golden["checkpoint"], tmp_path / "base")
    assert main(["merge", str(base), str(GOLDEN / name), "-o", str(tmp_path / "out")]) == 0
    return golden, tmp_path / "out"


@pytest.mark.parametrize("name", GENERATING)
def test_logits_are_those_of_peft(name, tmp_path):
    golden, folder = merged(name, tmp_path)
    model = PagedModel(folder, max_model_len=max_model_len_of(golden["checkpoint"]))
    logits = model.logits(prompt_of(golden["checkpoint"]))
    for position, top in golden["top"].items():
        np.testing.assert_allclose(logits[int(position)][top["ids"]], top["logits"], rtol=1e-4, atol=2e-4)
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=4e-3)
    hf, described = (json.loads((folder / "config.json").read_text()), CONFIGS[golden["checkpoint"]])
    is_untied = name in ("rslora_patterns", "tables", "dora")  # the head or the table of one that was tied
    assert hf == (described | {"tie_word_embeddings": False} if is_untied else described)


@pytest.mark.parametrize("name", SEEING)
def test_a_tower_sees_what_that_of_peft_sees(name, tmp_path):
    golden, folder = merged(name, tmp_path)
    checkpoint = golden["checkpoint"]
    table_CV = processor_of(SEEING_CONFIGS[checkpoint], preprocessor_config_of(checkpoint)).table_CV
    pictures = [pictures_of(checkpoint)[number] for number in pictures_of_prompts()[0]]
    model = SeeingModel(folder, table_CV)
    size = sum(model.config.vision.size_of(grid) for _, grid in pictures)
    logits = model.prompt_logits(prompts_of(checkpoint)[0], pictures, size)
    np.testing.assert_allclose(logits.sum(axis=1), golden["sums"], rtol=1e-4, atol=4e-3)


def test_scores_of_a_classifier_are_those_of_peft(tmp_path, monkeypatch):
    golden, folder = merged("classifier", tmp_path)
    monkeypatch.setattr("tests.models.paged.model_for", lambda hf: pooling_model(model_for(hf), "classify"))
    scores = PagedModel(folder).logits(prompt_of("qwen2"))[-1]
    np.testing.assert_allclose(scores, golden["labels"], rtol=1e-4, atol=2e-4)
